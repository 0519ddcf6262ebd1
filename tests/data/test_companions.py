"""Masks, thumbnails and copies beside images are told from images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from normexp.training.data.companions import find_companions


def photo(index: int, side: int = 32) -> Image.Image:
    coarse = np.random.default_rng(index).integers(0, 256, (8, 8), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side))


def mask(index: int) -> Image.Image:
    return Image.fromarray(np.asarray(photo(index)) // 128 * 255)


Draw = Callable[[int], Image.Image]


def companions(folder: Path, drawn: dict[str, Draw], num: int = 5) -> dict[str, set[str]]:
    """The names of the files that are found, by kind. drawn: by name, with {} for a number."""
    for name, draw in drawn.items():
        for index in range(num):
            file = folder / name.format(index)
            file.parent.mkdir(parents=True, exist_ok=True)
            draw(index).save(file)
    files = sorted(str(file) for file in folder.rglob("*.*") if file.is_file())
    found: dict[str, set[str]] = {}
    for file, kind in find_companions(files, str(folder)).items():
        found.setdefault(kind, set()).add(str(Path(file).relative_to(folder)))
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("scan ({})_mask.png", "NAME_mask"),
        ("depth-scan ({}).jpg", "depth-NAME"),
        ("masks/scan ({}) label.png", "NAME label"),
        ("@thumbs/scan ({}).png/small.png", "@thumbs/"),
        ("masks/scan ({}).png", "masks/*.png"),
        ("scan ({}).tif", "*.tif"),
    ],
)
def test_masks_are_found_by_their_names(tmp_path: Path, name: str, kind: str):
    found = companions(tmp_path, {"scan ({}).png": photo, name: mask})
    assert found == {kind: {name.format(index) for index in range(5)}}


def test_a_second_mask_of_an_image_counts_with_the_first(tmp_path: Path):
    companions(tmp_path, {"{}.png": photo, "{}_mask.png": mask})
    found = companions(tmp_path, {"{}_mask_1.png": mask}, num=1)
    assert found["NAME_mask_1"] == {"0_mask_1.png"} and len(found["NAME_mask"]) == 5


def test_smaller_pictures_of_the_same_are_thumbnails(tmp_path: Path):
    drawn: dict[str, Draw] = {"{}.png": photo, "small/{}.png": lambda index: photo(index, 16)}
    assert set(companions(tmp_path, drawn)) == {"small/*.png"}


@pytest.mark.parametrize(
    "name",
    [
        "{} (2).png",  # numbers count
        "{}b.png",
        "indoors/{}.png",  # other pictures of the same names
        "{}.jpg",
        "film2/{}.png",
    ],
)
def test_images_that_share_names_are_images(tmp_path: Path, name: str):
    assert not companions(tmp_path, {"{}.png": photo, name: lambda index: photo(index + 5)})


def test_a_word_that_few_names_have_means_nothing(tmp_path: Path):
    companions(tmp_path, {"cat{}.png": photo})
    assert not companions(tmp_path, {"cat{}_asleep.png": photo}, num=2)
