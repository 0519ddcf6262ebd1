"""Folders of images with a mask beside each: layouts, classes, and ten kinds of broken masks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from train_cases import results

from normexp.data import Data, Examples
from normexp.errors import UserError
from normexp.train import main
from normexp.training.data.augment import IGNORED
from normexp.training.data.build import build_data

SIDE = 8


def picture(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def classes_of(index: int) -> np.ndarray:
    """Four quarters of three classes, and a corner without one."""
    quarters = np.random.default_rng(index).permutation([0, 1, 2, 1]).reshape(2, 2)
    mask = np.kron(quarters, np.ones((SIDE // 2, SIDE // 2))).astype(np.uint8)
    mask[:2, :2] = IGNORED
    return mask


def as_palette(values: np.ndarray) -> Image.Image:
    image = Image.fromarray(values, "P")
    image.putpalette([*range(256)] * 3)  # of 256 colours, as VOC's
    return image


Save = Callable[[np.ndarray], Image.Image]


def write(images: Path, masks: Path, indices: range, save: Save = Image.fromarray) -> None:
    images.mkdir(parents=True, exist_ok=True)
    masks.mkdir(parents=True, exist_ok=True)
    for index in indices:
        Image.fromarray(picture(index)).save(images / f"{index}.bmp")
        save(classes_of(index)).save(masks / f"{index}.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten pictures of train, four of test."""
    root = tmp_path / "cells"
    for split, indices in (("train", range(10)), ("test", range(10, 14))):
        write(root / split / "images", root / split / "masks", indices)
    return root


def load(root: Path, **values: Any) -> Data:
    target = "normexp.training.data.image_folder.load_image_folder"
    words = {"_target_": target, "root": str(root), "data_dir": str(root.parent / "data")}
    words |= {"size": None, "val_fraction": 0.2, "split_seed": 0, "augmentation": None}
    return build_data(words | values)


def voc(root: Path) -> None:
    write(root / "JPEGImages", root / "SegmentationClass", range(15), as_palette)
    (root / "Annotations").mkdir()
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    for split, indices in {"train": range(10), "val": range(10, 14), "trainval": range(14)}.items():
        (lists / f"{split}.txt").write_text("".join(f"{index}\n" for index in indices))


def split_within(root: Path) -> None:
    for split, indices in (("training", range(10)), ("validation", range(10, 14))):
        write(root / "images" / split / "town", root / "annotations" / split / "town", indices)


def together(root: Path) -> None:
    write(root / "imgs", root / "labels", range(14), lambda v: Image.fromarray(v).convert("RGBA"))


@pytest.mark.parametrize("layout", [None, voc, split_within, together])
def test_images_and_masks_of_public_layouts(root: Path, layout: Callable[[Path], None] | None):
    if layout:
        root = root.with_name("other")
        layout(root)
    data = load(root)
    num_test = 3 if layout is together else 4  # a fifth
    lengths = [len(split) for split in data.splits.values()]
    assert lengths == ([9, 2, 3] if layout is together else [8, 2, 4])
    assert data.task == "segmentation" and data.num_outputs == 3
    assert (data.class_names, data.chance_accuracy) == (("0", "1", "2"), None)
    assert isinstance(data.test, Examples) and len(data.test) == num_test
    known = {picture(index).tobytes(): classes_of(index) for index in range(14)}
    for split in data.splits.values():
        for image, mask in zip(split.inputs, split.targets, strict=True):
            expected = known[image.permute(1, 2, 0).contiguous().numpy().tobytes()]
            np.testing.assert_array_equal(mask, expected)


def test_values_are_named_and_a_mask_is_scaled_without_blending(root: Path):
    for file in root.glob("*/masks/*.png"):
        values = np.asarray(Image.open(file))
        Image.fromarray(np.where(values == 2, 255, 0).astype(np.uint8)).save(file)
    data = load(root, classes={"nothing": 0, "cell": 255}, size=4)
    assert data.class_names == ("nothing", "cell")
    assert isinstance(data.test, Examples) and data.input_shape == (3, 4, 4)
    expected = torch.from_numpy(classes_of(10)[1::2, 1::2] == 2)  # the pixel right of each centre
    assert torch.equal(data.test.targets[0], expected.byte())


def test_images_turned_by_exif_have_masks_as_they_are_shown(root: Path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.fromarray(np.rot90(picture(3)[:, :6])).save(root / "train/images/3.png", exif=exif)
    (root / "train/images/3.bmp").unlink()
    Image.fromarray(classes_of(3)[:, :6]).save(root / "train/masks/3.png")
    data = load(root, size=4)
    assert len(data.train) + len(data.val) == 10


@pytest.mark.parametrize(
    ("orientation", "width"),
    [
        (6, 6),  # the sides show that the mask is drawn on the image before it is turned
        (6, 8),
        (3, 6),  # a half turn leaves the sides
    ],
)
def test_a_mask_that_may_lie_on_an_image_before_it_is_turned_is_refused(
    root: Path, orientation: int, width: int
):
    turn = Image.Exif()
    turn[0x0112] = orientation
    Image.fromarray(picture(3)[:, :width]).save(root / "train/images/3.png", exif=turn)
    (root / "train/images/3.bmp").unlink()
    mask = Image.fromarray(classes_of(3)[:, :width])
    mask.save(root / "train/masks/3.png")
    with pytest.raises(UserError, match="3.png before EXIF data turn it, .*; save the image"):
        load(root, size=4)
    mask.save(root / "train/masks/3.png", exif=turn)  # turned as its image
    assert load(root, size=4).task == "segmentation"


def test_palettes_that_differ_are_refused_but_one_may_be_longer(root: Path):
    for index, colours in ((3, [0, 0, 0, 255, 0, 0]), (4, [0, 0, 0, 255, 0, 0, 0, 255, 0])):
        image = Image.fromarray(classes_of(index) % 2, "P")
        image.putpalette(colours)
        image.save(root / f"train/masks/{index}.png")
    assert load(root).num_outputs == 3
    image.putpalette([255, 0, 0, 0, 0, 0])
    image.save(root / "train/masks/4.png")
    with pytest.raises(UserError, match=r"3.png and .*4.png have different palettes, .*; save"):
        load(root)


def test_classes_without_a_pixel_in_train_are_named(root: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "normexp")
    load(root)
    assert "no training pixel" not in caplog.text
    every(lambda v: np.where(v == 1, 3, v))(root)
    load(root)
    assert "no training pixel is of class 1, which therefore cannot be learned" in caplog.text


def test_masks_are_read_anew_when_a_file_changes(root: Path):
    first = load(root)
    assert load(root).digest == first.digest
    Image.fromarray(classes_of(99)).save(root / "train/masks/0.png")
    assert load(root).digest != first.digest


def redraw(change: Callable[[np.ndarray], Any], where: str = "train/masks/3.png", **options: Any):
    def spoil(root: Path) -> None:
        values = np.asarray(Image.open(root / where))
        Image.fromarray(change(values)).save(root / where, **options)

    return spoil


def every(change: Callable[[np.ndarray], np.ndarray]):
    def spoil(root: Path) -> None:
        for file in root.glob("*/masks/*.png"):
            Image.fromarray(change(np.asarray(Image.open(file))).astype(np.uint8)).save(file)

    return spoil


def rename(name: str, where: str = "train/masks/3.png"):
    return lambda root: (root / where).rename(root / Path(where).with_name(name))


def with_colours(values: np.ndarray) -> np.ndarray:
    return np.stack([values, 0 * values, values], axis=2)


BROKEN = {
    "missing": (
        rename("three.png"),
        r"3.bmp has no mask \(1 of 10.*needs.*3.png; it has three.png: rename",
    ),
    "no image file": (rename("3.npy"), r"3.bmp has no mask"),
    "torn": (
        lambda root: (root / "train/masks/3.png").write_bytes(b"PNG"),
        r"masks/3.png cannot be decoded \(.*replace it, or remove it and its image",
    ),
    "cropped": (redraw(lambda v: v[1:]), r"3.png has 8x7 pixels, its image 3.bmp has 8x8; scale"),
    "colours": (redraw(with_colours), r"3.png has colours; save the number of each pixel's"),
    "unknown": (
        redraw(lambda v: np.where(v == 1, np.uint8(9), v), "test/masks/11.png"),
        r"masks/11.png holds 9, which is no class \(the masks of train hold 0 to 2\); replace",
    ),
    "ignored": (redraw(lambda v: 0 * v + 255), r"3.png is 255 everywhere.*; remove it and"),
    "16 bits": (
        redraw(lambda v: v.astype(np.uint16) * 9),
        r"3.png holds numbers from 0 to 2295; number the classes by .* and save them in 8 bits",
    ),
    "floats": (redraw(lambda v: v / np.float32(2), format="TIFF"), r"3.png holds numbers from 0"),
    "JPEG": (redraw(lambda v: v, format="JPEG"), r"3.png is a JPEG, .*; save .* as PNG"),
    "GIF": (redraw(lambda v: v, format="GIF"), r"3.png is a GIF, .*; save .* as PNG"),
    "grey levels and 255": (
        every(lambda v: np.select([v == 1, v == 2], [128, 255], 0)),
        r"hold 0, 128, 255, .*'data.classes=\{name0:0,name1:128,name2:255\}'",
    ),
    "twice": (
        lambda root: Image.new("L", (8, 8)).save(root / "train/masks/3.tif"),
        r"masks/3.tif and 3.png have one name; keep one",
    ),
    "black and white": (
        every(lambda v: (v == 2) * 255),
        r"train hold 0, 255, not the numbers of classes.*'data.classes=\{name0:0,name1:255\}'",
    ),
    "grey levels": (every(lambda v: v % 3 * 100), r"hold 0, 100, 200, not the numbers of classes"),
    "one class": (every(lambda v: 0 * v), r"hold 0, not the numbers of classes"),
    "no masks of a split": (
        lambda root: (root / "test/masks").rename(root / "test/outlines"),
        r"test has no masks/; add the folder",
    ),
    "images of two sizes": (
        lambda root: [
            Image.new("RGB", (6, 6)).save(root / "train/images/3.bmp"),
            Image.new("L", (6, 6)).save(root / "train/masks/3.png"),
        ],
        r"3.bmp is 6x6 pixels.*set data.size",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_masks_are_named_with_a_remedy(root: Path, kind: str):
    spoil, message = BROKEN[kind]
    spoil(root)
    with pytest.raises(UserError, match=message) as refused:
        load(root)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({"a": 0}, "must name two or more classes"),
        ({"a": 0, "b": 0}, "with a value of its own"),
        ({"a": 0, "b": 300}, "from 0 to 255"),
        ([0, 1], r"data.classes=\[0,1\]: must name"),
        ({"a": 0, "b": 1}, r"png holds 2, which is no class \(data.classes has 0, 1\)"),
    ],
)
def test_bad_classes_are_refused(root: Path, classes: Any, message: str):
    with pytest.raises(UserError, match=message):
        load(root, classes=classes)


def test_lists_that_name_what_is_not_there_are_refused(tmp_path: Path):
    voc(tmp_path / "voc")
    (tmp_path / "voc/SegmentationClass/12.png").unlink()
    with pytest.raises(UserError, match="val.txt names 12, which SegmentationClass/ lacks; add"):
        load(tmp_path / "voc")
    (tmp_path / "voc/ImageSets/Segmentation/val.txt").write_text("")
    with pytest.raises(UserError, match="names no images in test.txt; add"):
        load(tmp_path / "voc")


def test_masks_without_an_image_are_named(root: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "normexp")
    Image.new("L", (8, 8)).save(root / "test/masks/77.png")
    (root / "train/masks/notes.txt").touch()
    load(root)
    assert "1 masks in" in caplog.text and "have no image, and are not read" in caplog.text
    assert "has files that are no images (notes.txt)" in caplog.text


def test_a_folder_of_masks_trains(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["data=image_folder", f"data.root={root}", "batch_size=4", "steps=2", "replicas=1"]
    words += ["workers=0", f"data_dir={tmp_path}", f"runs_dir={tmp_path / 'runs'}"]
    assert main([*words, "model=convnet"]) == 2
    assert re.search(r"needs \(2, 3, 8, 8\): try model=unet", capsys.readouterr().err)
    named = "data.classes={back:0,cell:1,wall:2}"
    assert main([*words, "model=unet", "norm=group", named]) == 0
    (result,) = results(tmp_path / "runs").values()
    assert {"test/iou", "val/miou"} <= result.metrics.keys()
    assert result.measured.data_set["class_names"] == ["back", "cell", "wall"]
