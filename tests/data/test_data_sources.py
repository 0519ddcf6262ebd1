"""The shipped sources, a few lines each; conf/data gives each function its arguments."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hydra.utils import get_method, instantiate
from omegaconf import OmegaConf
from torchvision import datasets

from normexp.data import Data, Examples, text
from normexp.data.dataset import validate
from normexp.data.images import load_cifar10, load_cifar100
from normexp.data.langid import read_own_strings
from normexp.errors import UserError

CONF = Path(__file__).parents[2] / "conf" / "data"
SHIPPED = sorted(path.stem for path in CONF.glob("*.yaml"))
IMAGE_OPTIONS = {"val_fraction": 0.1, "split_seed": 0, "augmentation": None}
TEXT_OPTIONS = {"block_size": 8, "val_fraction": 0.05, "test_fraction": 0.05}


def load(name: str, **changes) -> Data:
    """The data set of conf/data/<name>.yaml, with some of its values changed."""
    section = OmegaConf.load(CONF / f"{name}.yaml").data
    del section["limit_train"]  # which `build_data` reads
    data = instantiate(section, _convert_="all", _partial_=True, **changes)()
    validate(data)
    return data


def splits(data: Data) -> list[Examples]:
    return [part for part in (data.train, data.val, data.test) if isinstance(part, Examples)]


@pytest.mark.parametrize("name", SHIPPED)
def test_conf_gives_its_function_exactly_its_arguments(name: str):
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_" and lines[1].startswith("# ")
    section = OmegaConf.load(CONF / f"{name}.yaml").data
    function = get_method(section["_target_"])
    assert function.__name__ == f"load_{name}"
    assert {*section} - {"_target_", "limit_train"} == {*function.__annotations__} - {"return"}


def test_digits_hold_every_image_of_the_source_once():
    data = load("digits")
    assert [len(part) for part in splits(data)] == [1294, 144, 359]
    assert data.input_shape == (1, 8, 8) and data.source_version.startswith("scikit-learn ")
    source = datasets_of_sklearn()
    held = torch.cat([part.inputs for part in splits(data)]).flatten(1)
    assert (int(held.min()), int(held.max())) == (0, 255)
    back = (held.double() * 16 / 255).round()  # the 17 grey values survive the conversion
    assert sorted(back.tolist()) == sorted(source.tolist())


def datasets_of_sklearn() -> torch.Tensor:
    from sklearn.datasets import load_digits

    return torch.as_tensor(load_digits(return_X_y=True)[0])  # (1797, 64)


@pytest.mark.parametrize("name", ["digits", "langid"])
def test_split_seed_moves_val_and_leaves_test(name: str):
    (_, val, test), (_, other_val, other_test) = (
        splits(load(name)),
        splits(load(name, split_seed=1)),
    )
    assert torch.equal(test.inputs, other_test.inputs)
    assert not torch.equal(val.inputs, other_val.inputs)


def test_manual_is_the_language_reference_of_this_python():
    from pydoc_data.topics import topics

    data = load("manual")
    length = sum(len(part.tensors[0]) for part in (data.train, data.val, data.test))
    assert length == sum(map(len, topics.values())) + 2 * (len(topics) - 1) > 300_000
    assert data.source_version.startswith("python 3.")


def test_languages_are_balanced_and_share_no_string():
    data = load("langid")
    assert [len(part) for part in splits(data)] == [5760, 640, 1600]
    assert torch.bincount(data.test.tensors[1]).tolist() == [160] * 10
    own = read_own_strings(["de", "fr", "es", "it", "pl", "cs", "fi", "tr", "nl", "sv"], 32)
    names = [text for names in own.values() for text in names]
    assert len(names) == len(set(names))
    assert data.symbols is not None
    for part in splits(data):
        assert part.mask is not None and torch.equal(part.mask, part.inputs != 0)
        assert torch.equal(part.mask, part.mask.sort(dim=1, descending=True).values)
        assert bool((part.inputs == 1).any()) == (part is data.test)  # unknown characters
        for row, mask in zip(part.inputs[:100], part.mask[:100], strict=True):
            string = "".join(data.symbols[token] for token in row[mask].tolist())
            assert string in names or "<unknown>" in string
    assert load("langid").digest == data.digest
    assert load("langid", samples_per_language=100, max_length=5).input_shape == (5,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"languages": ["de", "xq"]}, "data.languages has 'xq'"),
        ({"languages": ["de"]}, "data.languages=.*two"),
        (
            {"samples_per_language": 100_000},
            r"samples_per_language=100000 must be 10 to \d+, .*'it'",
        ),
        ({"samples_per_language": 0}, "samples_per_language=0 must be 10 to"),
        ({"max_length": 0}, "data.max_length=0"),
    ],
)
def test_bad_arguments_of_langid_are_refused(arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        load("langid", **arguments)


def test_cifar_images_become_channels_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)

    def read(self: datasets.CIFAR10, root: str, train: bool, download: bool) -> None:
        assert download and root == str(tmp_path)
        self.data = pixels if train else pixels[:10]
        self.targets = [i % 10 for i in range(len(self.data))]
        self.classes = [f"class {i}" for i in range(10)]

    monkeypatch.setattr(datasets.CIFAR10, "__init__", read)
    data = load_cifar10(data_dir=str(tmp_path), **IMAGE_OPTIONS)
    validate(data)
    train, val, test = splits(data)
    assert (len(train), len(val), len(test)) == (18, 2, 10)
    assert torch.equal(test.inputs[3, 2], torch.from_numpy(pixels[3, :, :, 2]))
    assert test.targets.tolist() == list(range(10))


@pytest.mark.parametrize("placed", [False, True], ids=["nothing there", "placed by the user"])
@pytest.mark.parametrize("load", [load_cifar10, load_cifar100])
@pytest.mark.parametrize("error", [URLError("no route"), RuntimeError("corrupted")])
def test_failed_download_names_the_archive_and_leaves_the_folder_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load, placed: bool, error: Exception
):
    archive = tmp_path / "data" / f"{load.__name__.replace('load_cifar', 'cifar-')}-python.tar.gz"
    if placed:
        archive.parent.mkdir()
        archive.write_bytes(b"mine")

    def download(source: datasets.CIFAR10) -> None:
        if not placed:
            (archive.parent / source.filename).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(datasets.CIFAR10, "download", download)
    with pytest.raises(UserError, match=f"{archive.name}.*{archive.parent}.*data=digits"):
        load(data_dir=str(archive.parent), **IMAGE_OPTIONS)
    assert archive.exists() == archive.parent.exists() == placed


@pytest.fixture
def shakespeare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that stands for the one on the network."""
    file = tmp_path / "server" / "input.txt"
    file.parent.mkdir()
    file.write_bytes(b"To be, or not to be. " * 100)
    monkeypatch.setattr(text, "SHAKESPEARE_URL", file.as_uri())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(text, "SHAKESPEARE_SHA256", digest)
    return file


def test_shakespeare_is_downloaded_once(shakespeare: Path, tmp_path: Path):
    first = text.load_shakespeare(data_dir=str(tmp_path / "data"), **TEXT_OPTIONS)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["tinyshakespeare.txt"]
    shakespeare.unlink()
    again = text.load_shakespeare(data_dir=str(tmp_path / "data"), **TEXT_OPTIONS)
    assert again.digest == first.digest


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("captive portal")])
def test_failed_download_of_shakespeare_leaves_nothing(shakespeare: Path, tmp_path: Path, damage):
    damage(shakespeare)
    with pytest.raises(UserError, match=f"tinyshakespeare.txt.*{tmp_path / 'data'}.*data=digits"):
        text.load_shakespeare(data_dir=str(tmp_path / "data"), **TEXT_OPTIONS)
    assert not (tmp_path / "data").exists()


def test_another_file_instead_of_shakespeare_is_refused(tmp_path: Path):
    path = tmp_path / "tinyshakespeare.txt"
    path.write_text("Marlowe")
    with pytest.raises(UserError, match=f"{path}.*data=text_file data.path={path}"):
        text.load_shakespeare(data_dir=str(tmp_path), **TEXT_OPTIONS)
