"""A folder of images: decoding, the cache, refusals by file name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from normexp.data import Data, Examples, sources
from normexp.data.dataset import validate
from normexp.data.image_folder import load_image_folder
from normexp.errors import UserError


def pixels(split: str, name: str, index: int, height: int = 6, width: int = 5) -> np.ndarray:
    seed = sum(map(ord, split + name)) * 100 + index
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """train: 5 cats, 5 dogs; test: 2 of each; beside them a val folder and hidden files."""
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
    (root / "val" / "bird").mkdir(parents=True)
    return root


def load(root: Path, size: int | None = None, split_seed: int = 0, **moments: Any) -> Data:
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
    data = load(root)
    assert (len(data.train), len(data.val), len(data.test)) == (8, 2, 4)
    assert data.num_outputs == 2 and data.input_shape == (3, 6, 5)
    assert isinstance(data.test, Examples)
    assert data.test.targets.tolist() == [0, 0, 1, 1]
    for row, (name, index) in enumerate([("cat", 0), ("cat", 1), ("dog", 0), ("dog", 1)]):
        expected = torch.from_numpy(pixels("test", name, index)).permute(2, 0, 1)
        assert torch.equal(data.test.inputs[row], expected)


def test_class_folders_are_split_the_same_for_every_split_seed(root: Path):
    flat = root / "train"
    first, other = load(flat), load(flat, split_seed=3)
    assert [len(part) for part in (first.train, first.val, first.test)] == [6, 2, 2]
    assert torch.equal(first.test.tensors[0], other.test.tensors[0])
    assert sorted(first.test.tensors[1].tolist()) == [0, 1]  # a fifth of five of each
    assert not torch.equal(first.val.tensors[0], other.val.tensors[0])
    for name in ("0", "1", "2"):
        (flat / "cat" / f"{name}.png").unlink()
    with pytest.raises(UserError, match="a class has fewer than three images"):
        load(flat)


def test_grey_images_of_8_and_16_bits_nested_folders_and_capital_suffixes_count(root: Path):
    grey, deep = pixels("test", "cat", 0)[..., 0], np.linspace(0, 65535, 30, dtype=np.uint16)
    for index, image in enumerate((grey, deep.reshape(6, 5))):
        Image.fromarray(image).save(root / f"test/cat/{index}.png")
    (root / "train/cat/more").mkdir()
    Image.fromarray(pixels("train", "cat", 9)).save(root / "train/cat/more/x.JPG", quality=95)
    data = load(root)
    assert isinstance(data.test, Examples)
    assert torch.equal(data.test.inputs[0], torch.from_numpy(grey).expand(3, -1, -1))
    shallow = torch.from_numpy((deep // 257).astype(np.uint8)).view(6, 5)
    assert torch.equal(data.test.inputs[1], shallow.expand(3, -1, -1))
    assert len(data.train) == 9


def test_size_scales_and_crops_the_centre(root: Path):
    wide = np.zeros((8, 16, 3), dtype=np.uint8)
    wide[:, 4:12] = 200  # the central square
    Image.fromarray(wide).save(root / "test/cat/0.png")
    data = load(root, size=4)
    assert isinstance(data.test, Examples)
    assert data.input_shape == (3, 4, 4)
    assert (data.test.inputs[0].float() - 200).abs().max() <= 25  # bicubic overshoots


def test_given_mean_and_deviation_replace_those_of_the_images(root: Path):
    data = load(root, mean=[0.5, 0.25, 0.0], std=[0.5, 0.5, 2 / 255])
    white = data.model_inputs(torch.full((3, 1, 1), 255, dtype=torch.uint8)).flatten()
    torch.testing.assert_close(white, torch.tensor([1.0, 1.5, 127.5]))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"size": 0}, "data.size=0"),
        ({"mean": [0.5] * 3}, "data.std=None: must be three numbers"),
        ({"mean": [0.5] * 3, "std": [0.2, 0.2]}, r"data.std=\[0.2,0.2\]: must be three numbers"),
        ({"mean": [124, 116, 104], "std": [0.2] * 3}, r"data.mean=\[124,.*from 0 to 1"),
        ({"mean": "imagenet", "std": [0.2] * 3}, r"data.mean=imagenet: .*\[0.485,0.456,0.406\]"),
    ],
)
def test_bad_sizes_means_and_deviations_are_refused(
    root: Path, knobs: dict[str, Any], message: str
):
    with pytest.raises(UserError, match=message):
        load(root, **knobs)


def test_second_load_reads_the_cache_until_a_file_is_edited(
    root: Path, capsys: pytest.CaptureFixture[str]
):
    first = load(root)
    assert "decoding 14 images of data.root=" in capsys.readouterr().err
    path = root / "train/cat/3.png"
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)  # noticed only by decoding the file again
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load(root).digest == first.digest
    assert capsys.readouterr().err == ""
    assert len(list((root.parent / "data/cache").iterdir())) == 1
    Image.fromarray(pixels("edited", "cat", 0)).save(path)
    assert load(root).digest != first.digest


def test_cache_that_cannot_be_written_is_reported(root: Path, caplog: pytest.LogCaptureFixture):
    (root.parent / "data").write_text("a file where the folder should be")
    assert len(load(root).train) == 8
    assert str(root.parent / "data" / "cache") in caplog.text


SPOILT = {  # how a folder is made unusable, by the message
    "data.root=.*pets: .*No such file.*train/<class>/": shutil.rmtree,
    "pets has train/ alone.*data.root=.*pets/train": lambda root: shutil.rmtree(root / "test"),
    "no valid file for the classes dog": lambda root: [
        p.unlink() for p in root.glob("train/dog/?.png")
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
        load(root)
    assert not (root.parent / "data").exists()


def test_corrupt_files_are_refused_with_their_names_and_reasons(root: Path):
    half, none = root / "test/dog/1.png", root / "train/cat/0.png"
    whole = half.read_bytes()
    half.write_bytes(whole[: len(whole) // 2])
    none.write_bytes(b"")
    found = rf"{none} \(UnidentifiedImageError: .*{half} \(OSError: .*truncated.*replace or remove"
    with pytest.raises(UserError, match=found):
        load(root)


def test_more_images_than_memory_holds_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match="14 images of 6x5 needs .* GB of memory.*data.size"):
        load(root)
