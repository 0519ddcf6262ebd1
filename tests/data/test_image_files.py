"""Image files as viewers show them, folders named like splits, and copies between splits."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from normexp.data import Data
from normexp.errors import UserError
from normexp.training.data.build import build_data
from normexp.training.data.image_folder import load_image_folder
from normexp.training.data.pixels import decode_images

Draw = Callable[[np.random.Generator], Image.Image]


def noise(rng: np.random.Generator, *shape: int, most: int = 255) -> np.ndarray:
    return rng.integers(0, most + 1, shape or (6, 5, 3), dtype=np.int64).astype(np.uint8)


def decoded(tmp_path: Path, image: Image.Image, suffix: str, **options: object) -> np.ndarray:
    """The pixels (H, W, 3) that a file is decoded to."""
    file = tmp_path / f"image{suffix}"
    image.save(file, **options)
    (pixels,) = decode_images([file], None, "data.root=here")
    return pixels.permute(1, 2, 0).numpy()


UPRIGHT = {  # the image that a viewer shows, of the stored one, by EXIF orientation
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("suffix", [".png", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_photographs_are_turned_as_their_orientation_says(
    tmp_path: Path, orientation: int, suffix: str
):
    stored = noise(np.random.default_rng(orientation))
    exif = Image.Exif()
    exif[0x0112] = orientation
    kept = {"lossless": True} if suffix == ".webp" else {}
    shown = decoded(tmp_path, Image.fromarray(stored), suffix, exif=exif, **kept)
    np.testing.assert_array_equal(shown, UPRIGHT[orientation](stored))


def test_exif_data_that_nothing_can_read_change_nothing(tmp_path: Path):
    stored = noise(np.random.default_rng(0))
    for exif in (b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01"):
        shown = decoded(tmp_path, Image.fromarray(stored), ".png", exif=exif)
        np.testing.assert_array_equal(shown, stored)


def test_transparent_pixels_are_shown_over_white(tmp_path: Path):
    rng = np.random.default_rng(0)
    rgb, alpha = noise(rng), noise(rng, 6, 5)
    alpha[:2], alpha[2:4] = 0, 255
    share = alpha[..., None] / 255
    for colours, mode in ((rgb, "RGBA"), (rgb[..., :1], "LA")):
        over_white = colours * share + 255 * (1 - share)
        shown = decoded(tmp_path, Image.fromarray(np.dstack([colours, alpha])), ".png").astype(int)
        assert np.abs(shown - over_white).max() <= 1, mode
        np.testing.assert_array_equal(shown[2:4], np.broadcast_to(colours, rgb.shape)[2:4])
    palette = Image.fromarray(rgb).quantize(8)
    clear = palette.getpixel((0, 0))
    for image in (palette, Image.fromarray(noise(rng, 6, 5))):
        clear = image.getpixel((0, 0))
        shown = decoded(tmp_path, image, ".png", transparency=clear)
        is_clear = np.asarray(image) == clear
        assert (shown[is_clear] == 255).all()
        opaque = np.asarray(image.convert("RGB"))
        np.testing.assert_array_equal(shown[~is_clear], opaque[~is_clear])


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize(("most", "white"), [(900, 1023), (3000, 4095), (9000, 16383), (200, 255)])
def test_deep_grey_images_of_a_folder_share_the_depth_of_the_brightest(
    tmp_path: Path, most: int, white: int, suffix: str
):
    rng, files = np.random.default_rng(0), []
    levels = [rng.integers(0, high, (6, 5)).astype(np.uint16) for high in (most, most // 3)]
    levels[0][0, 0] = most
    for index, values in enumerate(levels):
        files.append(tmp_path / f"{index}{suffix}")
        Image.fromarray(values).save(files[-1])
    shown = decode_images(files, None, "data.root=here")
    for pixels, values in zip(shown, levels, strict=True):
        expected = torch.from_numpy(values.astype(np.int64) * 255 // white)
        assert torch.equal(pixels, expected.to(torch.uint8).expand(3, -1, -1))


def test_floats_from_0_to_1_and_to_255_keep_their_contrast(tmp_path: Path):
    ramp = np.linspace(0, 1, 30, dtype=np.float32).reshape(6, 5)
    for scale in (1, 255):
        shown = decoded(tmp_path, Image.fromarray(ramp * scale), ".tif")
        np.testing.assert_array_equal(shown[..., 0], np.floor(ramp * scale * (255 / scale)))


UNUSABLE: dict[str, Draw] = {
    "whole numbers from -": lambda rng: Image.fromarray(
        rng.integers(-500, 500, (6, 5)).astype(np.int32)
    ),
    "floats from -": lambda rng: Image.fromarray(rng.normal(0, 1, (6, 5)).astype(np.float32)),
    "floats from nan": lambda _: Image.fromarray(np.full((6, 5), np.nan, dtype=np.float32)),
    "between 77 and 77 of 255": lambda _: Image.new("L", (6, 5), 77),
    "between 0 and 5 of 255, too little": lambda rng: Image.fromarray(noise(rng, 6, 5, most=5)),
    "between 0 and 1 of 255, too little": lambda rng: Image.fromarray(
        rng.uniform(0, 1.9, (6, 5)).astype(np.float32)
    ),
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_images_without_contrast_or_scale_are_refused(tmp_path: Path, message: str):
    image = UNUSABLE[message](np.random.default_rng(0))
    with pytest.raises(UserError, match=f"^data.root=here: .*{message}"):
        decoded(tmp_path, image, ".tif")


def test_a_single_hot_pixel_hides_no_lack_of_contrast(tmp_path: Path):
    values = np.random.default_rng(0).integers(0, 900, (150, 150)).astype(np.uint16)
    values[3, 4] = 65535
    with pytest.raises(UserError, match="nearly every pixel is between 0 and 3"):
        decoded(tmp_path, Image.fromarray(values), ".png")


def test_black_and_white_has_contrast_enough(tmp_path: Path):
    ink = np.zeros((100, 100), dtype=bool)
    ink[50, 20:80] = True
    shown = decoded(tmp_path, Image.fromarray(ink), ".png")
    assert sorted({*shown.flatten().tolist()}) == [0, 255]


def test_the_first_frame_of_several_is_used_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "normexp")
    frames = [Image.fromarray(noise(np.random.default_rng(k))).quantize(64) for k in (0, 1)]
    shown = decoded(tmp_path, frames[0], ".gif", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(shown, np.asarray(frames[0].convert("RGB")))
    assert "only the first of several frames is read of 1 file" in caplog.text


# --- Folders --------------------------------------------------------------------------------------


def save(root: Path, folder: str, count: int = 5, classes: Sequence[str] = "ab") -> None:
    """Images of two classes, all different, in <root>/<folder>/<class>/."""
    for name in classes:
        (root / folder / name).mkdir(parents=True)
        for index in range(count):
            rng = np.random.default_rng([*folder.encode(), *name.encode(), index])
            Image.fromarray(noise(rng)).save(root / folder / name / f"{index}.png")


def load(root: Path) -> Data:
    return load_image_folder(
        root=str(root),
        size=None,
        data_dir=str(root.parent / "data"),
        val_fraction=0.2,
        split_seed=0,
        augmentation=None,
    )


@pytest.mark.parametrize(
    ("folders", "lengths"),  # of train, val and test
    [
        ({"Training": 5, "TEST": 3}, (8, 2, 6)),
        ({"train_set": 5, "test-set": 3}, (8, 2, 6)),
        ({"TRAIN": 5, "Valid": 4, "Testing": 3}, (10, 8, 6)),
        ({"train": 5, "dev": 4}, (8, 2, 8)),
        ({"train": 5, "evaluation": 3, "extra": 2}, (8, 2, 6)),
        ({"photos_train": 5, "photos_test": 3}, (8, 2, 6)),
        ({"train_set": 5, "test-images": 3, "extra": 2}, (8, 2, 6)),
        ({"01 Trainset": 5, "02 Testset": 3}, (8, 2, 6)),
        ({"x_train": 5, "x_test": 3, "x_unsorted": 2}, (8, 2, 6)),
        ({"train": 5, "test": 3, "more_train": 2, "other": 2}, (8, 2, 6)),
    ],
)
def test_folders_named_like_splits_are_splits(tmp_path: Path, folders: dict, lengths: tuple):
    for name, count in folders.items():
        save(tmp_path / "root", name, count)
    data = load(tmp_path / "root")
    assert data.class_names == ("a", "b")
    assert (len(data.train), len(data.val), len(data.test)) == lengths


def test_a_file_that_pillow_only_names_is_no_image(tmp_path: Path):
    for name in ("train", "test"):
        save(tmp_path / "root", name)
    (tmp_path / "root" / "train" / "a" / "features.h5").write_bytes(b"x")
    assert len(load(tmp_path / "root").test) == 10


def test_a_word_of_a_split_in_the_name_of_a_class_means_nothing(tmp_path: Path):
    for name in ("eval_kit", "training_shoe", "cat"):
        save(tmp_path / "root", name, classes=(f"{name}1", f"{name}2"))
    assert load(tmp_path / "root").class_names == ("cat", "eval_kit", "training_shoe")


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train", "Training", "test"], "has both Training/ and train/"),
        (["val", "test"], "root has test/ and val/, and needs train/"),
        (["archive"], "has one class, archive, .*root/archive"),
        (
            ["cat/train", "cat/TEST", "dog/train", "dog/TEST"],
            "class cat has folders of splits of its own",
        ),
        (["gtFine/train", "gtFine/val", "leftImg8bit/train"], "with masks, call the two folders"),
    ],
)
def test_trees_that_mean_something_else_are_refused(tmp_path: Path, folders: list, message: str):
    for name in folders:
        save(tmp_path / "root", name)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "root")


@pytest.mark.parametrize("suffix", [".jp2", ".tga", ".ICO", ".pcx"])
def test_every_format_that_pillow_opens_is_an_image(tmp_path: Path, suffix: str):
    save(tmp_path, "root")
    for file in (tmp_path / "root").glob("*/*.png"):
        Image.open(file).resize((16, 16)).save(file.with_suffix(suffix))
        file.unlink()
    data = load(tmp_path / "root")
    assert (len(data.train), len(data.val), len(data.test)) == (6, 2, 2)


def test_names_of_classes_are_equal_however_their_accents_are_stored(tmp_path: Path):
    for split, name in (("train", "caf\u00e9"), ("test", "cafe\u0301")):
        save(tmp_path / "root", split)
        (tmp_path / "root" / split / "b").rename(tmp_path / "root" / split / name)
    data = load(tmp_path / "root")
    assert data.class_names == ("a", "caf\u00e9")
    assert data.test.targets.tolist() == [0] * 5 + [1] * 5


def test_both_forms_of_an_accent_in_one_tree_are_one_class_in_one_order(tmp_path: Path):
    orders = []
    for form in ("NFC", "NFD"):
        root = tmp_path / form / "root"
        save(root.parent, "root", classes="abz")
        (root / "b").rename(root / unicodedata.normalize(form, "\u00e9t\u00e9"))
        orders.append(load(root))
    assert orders[0].class_names == orders[1].class_names == ("a", "z", "\u00e9t\u00e9")
    assert orders[0].digest == orders[1].digest
    (root / "a").rename(root / "\u00e9t\u00e9")
    assert load(root).class_names == ("z", "\u00e9t\u00e9")


def test_images_of_splits_without_classes_are_refused(tmp_path: Path):
    save(tmp_path, "root", classes=("train-images", "test-images"))
    with pytest.raises(UserError, match="would be test-images, train-images, named like splits"):
        load(tmp_path / "root")


def test_a_class_may_be_named_like_a_split(tmp_path: Path):
    save(tmp_path, "root", classes="bt")
    (tmp_path / "root/t").rename(tmp_path / "root/train")
    assert load(tmp_path / "root").class_names == ("b", "train")


def test_files_and_folders_that_are_left_out_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "normexp")
    for name in ("train", "test", "notes"):
        save(tmp_path / "root", name)
    (tmp_path / "root/train/a/photo.HEIC").touch()
    (tmp_path / "root/test/a/0.png").rename(tmp_path / "root/test/0.png")
    load(tmp_path / "root")
    assert "notes is not read" in caplog.text
    assert "not read: 2 files (images beside the class folders, .heic)" in caplog.text
    assert "root: 2 classes (a, b); images: 8 train, 2 val, 9 test" in caplog.text


def test_copies_between_splits_are_counted_also_in_another_format(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "root"
    for name in ("train", "val", "test"):
        save(root, name)
    for index, suffix in enumerate((".bmp", ".tif", ".webp")):
        image = Image.open(root / f"train/a/{index}.png")
        image.save(root / f"test/b/copy{suffix}", **({"lossless": True} if index == 2 else {}))
    Image.open(root / "train/b/0.png").save(root / "val/b/0.png", pnginfo=PngImagePlugin.PngInfo())
    words = {"_target_": "normexp.training.data.image_folder.load_image_folder", "size": None}
    words |= {"root": "~/root", "data_dir": "~/data", "augmentation": None}
    build_data(words | {"val_fraction": 0.2, "split_seed": 0})
    for said in ("3 of 13 samples of test", "1 of 10 samples of val"):
        assert f"{said} are also training samples (exact copies)" in caplog.text
    assert (tmp_path / "data/cache").is_dir()


def test_each_folder_is_read_once_and_hidden_ones_never(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "normexp")
    root = tmp_path / "root"
    save(root, "train")
    save(root, "test", count=3)
    (root / "train/a/again").symlink_to(root / "train/a")
    save(root / "test/a", ".checkpoints", classes="x")
    data = load(root)
    assert (len(data.train), len(data.val), len(data.test)) == (8, 2, 6)
    assert "within class folders" not in caplog.text


def test_folders_of_programs_are_no_classes_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(tmp_path, "root", classes=("a", "b", "__MACOSX"))
    save(tmp_path / "root", "a", count=1, classes=("__MACOSX",))
    data = load(tmp_path / "root")
    assert data.class_names == ("a", "b") and len(data.train) + len(data.val) == 8
    assert "__MACOSX/ is not read; if it is a class, rename it" in caplog.text


def test_classes_without_a_training_sample_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for split in ("train", "test"):
        save(tmp_path / "root", split, count=8)
        save(tmp_path / "root", split, count=1, classes=("rare",))
    words = {"_target_": "normexp.training.data.image_folder.load_image_folder", "size": None}
    words |= {"root": str(tmp_path / "root"), "data_dir": str(tmp_path), "augmentation": None}
    words |= {"val_fraction": 0.2, "split_seed": 0}
    told = []
    for limit in (None, 1):
        caplog.clear()
        data = build_data(words | {"limit_train": limit})
        missing = {0, 1, 2} - {*data.train.targets.tolist()}  # type: ignore[union-attr]
        told.append("no training sample is of class" in caplog.text)
        assert told[-1] == bool(missing)
    assert told[-1] and "which therefore cannot be learned" in caplog.text


def test_folders_within_classes_count_as_the_outer_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "normexp")
    save(tmp_path / "root", "cat", classes=("cat_indoors", "both"))
    save(tmp_path / "root", "dog", classes=("dog_indoors", "both"))
    assert load(tmp_path / "root").class_names == ("cat", "dog")
    assert "20 images lie in folders within class folders (" in caplog.text


def test_classes_within_folders_of_cross_validation_are_refused(tmp_path: Path):
    for name in ("first", "second"):
        save(tmp_path / "root", name)
    save(tmp_path / "root", "third", classes="abc")
    with pytest.raises(UserError, match="first, second, third hold the same folders .a, b.; if"):
        load(tmp_path / "root")


def test_masks_beside_images_are_named_and_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(tmp_path, "root")
    without = load(tmp_path / "root")
    for file in [*(tmp_path / "root").glob("*/*.png")]:
        Image.new("L", (5, 6)).save(file.with_name(f"{file.stem}_lesion.png"))
    assert load(tmp_path / "root").digest == without.digest
    assert "10 files beside the images are masks, thumbnails or copies" in caplog.text
    assert "(NAME_lesion)" in caplog.text


def test_an_archive_has_to_be_unpacked(tmp_path: Path):
    (tmp_path / "photos.zip").touch()
    with pytest.raises(UserError, match="photos.zip is a file; unpack it"):
        load(tmp_path / "photos.zip")
