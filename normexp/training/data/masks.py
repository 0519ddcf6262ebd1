"""Images with a mask beside each, which says the class of each pixel."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from normexp.errors import UserError, one_line
from normexp.training.data.augment import IGNORED
from normexp.training.data.folders import (
    SPLIT,
    find_splits,
    in_one_form,
    readable_kinds,
    subfolders,
    walk,
)
from normexp.words import as_typed, name_some

log = logging.getLogger(__name__)

ROLE = re.compile(r"(?P<images>images?|imgs?)|(?P<masks>masks?|labels?|annotations?)", re.I)
# What the Pascal VOC and data sets in its form have.
VOC = {"images": "JPEGImages", "masks": "SegmentationClass", "lists": "ImageSets/Segmentation"}
LEVELS = 256  # that a mask may hold
UPRIGHT, FIRST_ON_ITS_SIDE = 1, 5  # orientations of EXIF: 5 to 8 swap width and height
# Formats whose files do not keep the numbers of classes.
UNFIT = {"JPEG": "which blends them", "GIF": "whose writers number colours anew in each file"}


class Pair(NamedTuple):
    """The files of an image and of its mask."""

    image: Path
    mask: Path


# --- Which mask belongs to which image ------------------------------------------------------------


def find_pairs(root: Path, folders: Mapping[str, Path], name: str) -> dict[str, list[Pair]]:
    """The images and masks of train, maybe test and val; empty if `root` has no folder of masks.

    `images/` and `masks/` lie in the folder of each split, or hold a folder for each split; without
    splits, all are of train. A mask has the name of its image. In the form of the Pascal VOC, lists
    name the images of each split.

    Args:
        folders: of each split; of train alone, `root`, if no folder is named like a split.

    Raises:
        UserError: begins with `name`. An image without a mask, two masks of one, or a split that
            lacks either folder.
    """
    if (root / VOC["lists"]).is_dir():
        return _listed_pairs(root, name)
    roles = {split: _roles(folder, name) for split, folder in folders.items()}
    if not any("masks" in of_split and "images" in of_split for of_split in roles.values()):
        return {}
    for split, of_split in roles.items():
        for role in ("images", "masks"):
            if role not in of_split:
                raise UserError(
                    f"{name}: {folders[split]} has no {role}/; add the folder, or move "
                    f"{folders[split].name}/ elsewhere"
                )
    if folders["train"] == root:
        images, masks = roles["train"]["images"], roles["train"]["masks"]
        inner = find_splits(images, f"{name}/{images.name}", holds_files=True)
        if inner:
            roles = {s: {"images": f, "masks": masks / f.name} for s, f in inner.items()}
    return {split: _pairs(f["images"], f["masks"], name) for split, f in roles.items()}


def _roles(folder: Path, name: str) -> dict[str, Path]:
    """The folders of images and of masks in a folder."""
    roles: dict[str, Path] = {}
    for inner in subfolders(folder):
        found = ROLE.fullmatch(inner.name)
        if found is None:
            continue
        role = str(found.lastgroup)
        if role in roles:
            raise UserError(f"{name} has both {roles[role].name}/ and {inner.name}/; keep one")
        roles[role] = inner
    return roles


def _pairs(images: Path, masks: Path, name: str) -> list[Pair]:
    if not masks.is_dir():
        raise UserError(f"{name}: there is no {masks} for {images}; add the masks")
    files, of_masks = _by_place(images, name), _by_place(masks, name)
    if not files:
        raise UserError(f"{name}: {images} has no images; it needs some (jpg, png, tif, ...)")
    missing = [file for place, file in files.items() if place not in of_masks]
    unused = [file for place, file in of_masks.items() if place not in files]
    if missing:
        example = f"; it has {unused[0].name}: rename it, if it is the mask" if unused else ""
        raise UserError(
            f"{name}: {missing[0]} has no mask ({len(missing)} of {len(files)} images); {masks} "
            f"needs an image file {missing[0].stem}.png{example}"
        )
    if unused:
        log.info("%s: %d masks in %s have no image, and are not read", name, len(unused), masks)
    return [Pair(file, of_masks[place]) for place, file in files.items()]


def _by_place(folder: Path, name: str) -> dict[str, Path]:
    """The image files below a folder, by their place in it without the ending."""
    kinds, files, skipped = readable_kinds(), {}, []
    for place, file in walk(folder):
        path = Path(place, file)
        if path.suffix.lower() not in kinds:
            skipped.append(file)
            continue
        key = in_one_form(os.path.splitext(os.path.relpath(path, folder))[0])
        if key in files:
            raise UserError(f"{name}: {path} and {files[key].name} have one name; keep one of them")
        files[key] = path
    if skipped:
        log.info("%s: %s has files that are no images (%s)", name, folder, name_some(skipped))
    return files


def _listed_pairs(root: Path, name: str) -> dict[str, list[Pair]]:
    """The pairs of a data set in the form of the Pascal VOC; its val is the test split."""
    for role in ("images", "masks"):
        if not (root / VOC[role]).is_dir():
            raise UserError(f"{name} has {VOC['lists']}/ but no {VOC[role]}/; unpack it whole")
    images, masks = (_by_place(root / VOC[role], name) for role in ("images", "masks"))
    pairs: dict[str, list[Pair]] = {}
    for file in sorted((root / VOC["lists"]).glob("*.txt")):
        split = SPLIT.fullmatch(file.stem)
        if split is None:
            continue
        listed = [in_one_form(line.strip()) for line in file.read_text("utf-8").splitlines()]
        listed = [stem for stem in listed if stem]
        for stem in listed:
            for of_role, role in ((images, "images"), (masks, "masks")):
                if stem not in of_role:
                    raise UserError(
                        f"{name}: {file} names {stem}, which {VOC[role]}/ lacks; add the file, or "
                        "remove the name"
                    )
        pairs[str(split.lastgroup)] = [Pair(images[stem], masks[stem]) for stem in listed]
    if "test" not in pairs and "val" in pairs:
        pairs["test"] = pairs.pop("val")
        log.info("%s has no test.txt: val.txt is the test split, val is split off train", name)
    for split in ("train", "test"):
        if not pairs.get(split):
            raise UserError(f"{name}: {VOC['lists']}/ names no images in {split}.txt; add some")
    return pairs


# --- What a mask says -----------------------------------------------------------------------------


def decode_masks(pairs: Sequence[Pair], size: int | None, name: str) -> Tensor:
    """The values of all masks as they are stored, uint8 (N, H, W); see `_decode`.

    Raises:
        UserError: begins with `name`. A mask that cannot be read, holds no numbers of classes,
            does not lie on its image, or has another palette than the others.
    """

    def decode(pair: Pair) -> tuple[np.ndarray, list[int]]:
        try:
            return _decode(pair, size)
        except UserError as error:
            raise UserError(f"{name}: {pair.mask} {error}") from error
        except Exception as error:  # Pillow raises half a dozen unrelated types for a broken file
            raise UserError(
                f"{name}: {pair.mask} cannot be decoded ({one_line(error)}); replace it, or remove "
                "it and its image"
            ) from error

    with ThreadPoolExecutor() as pool:
        values, palettes = zip(*pool.map(decode, pairs), strict=True)
    _refuse_palettes({p.mask: of_mask for p, of_mask in zip(pairs, palettes, strict=True)}, name)
    return torch.from_numpy(np.stack(values))


def _refuse_palettes(palettes: Mapping[Path, Sequence[int]], name: str) -> None:
    """Raises UserError if a number has different colours in two masks, so not one meaning.

    One palette may end before another: some programs leave out what comes after the last class.
    """
    longest, of_longest = None, []
    for file, palette in palettes.items():
        shared = min(len(palette), len(of_longest))
        if [*palette[:shared]] != [*of_longest[:shared]]:
            raise UserError(
                f"{name}: {longest} and {file} have different palettes, so that a number may be "
                "another class in each; save the number of the class that each colour stands for, "
                "in one channel"
            )
        if len(palette) > shared:
            longest, of_longest = file, palette


def _decode(pair: Pair, size: int | None) -> tuple[np.ndarray, list[int]]:
    """The values of one mask, uint8 (H, W), scaled and cropped as its image but never blended.

    Returns:
        The values, and the palette of their colours as red, green, blue, red, ...; [] without one.
    """
    with Image.open(pair.mask) as opened:
        if opened.format in UNFIT:
            raise UserError(
                f"is a {opened.format}, {UNFIT[opened.format]}; save the numbers of classes as PNG"
            )
        is_turned = _orientation(opened) != UPRIGHT
        mask = ImageOps.exif_transpose(opened)
    _refuse_place(mask.size, is_turned, pair.image)
    palette = (mask.getpalette() or []) if mask.mode.startswith("P") else []
    bands = zip(mask.getbands(), mask.split(), strict=True)
    values, *others = [np.asarray(band) for band_name, band in bands if band_name != "A"]
    for other in others:
        if (other != values).any():
            raise UserError(
                "has colours; save the number of each pixel's class in their place, in one channel "
                "or as a palette"
            )
    lowest, highest = values.min(), values.max()
    if not (0 <= lowest <= highest < LEVELS) or (values % 1).any():
        raise UserError(
            f"holds numbers from {lowest:g} to {highest:g}; number the classes by whole numbers "
            f"from 0 to {IGNORED - 1}, where {IGNORED} counts as none, and save them in 8 bits"
        )
    values = values.astype(np.uint8)
    if size is not None:
        scaled = ImageOps.fit(Image.fromarray(values), (size, size), Image.Resampling.NEAREST)
        values = np.asarray(scaled)
    return values, palette


def _refuse_place(size: tuple[int, int], is_turned: bool, file: Path) -> None:
    """Raises UserError unless a mask is known to lie on its image as a viewer shows the image.

    Args:
        size: width and height of the mask as a viewer shows it.
        is_turned: the mask itself has EXIF data that turn it.
        file: the image.
    """
    with Image.open(file) as image:
        orientation = _orientation(image)
        shown = image.size if orientation == UPRIGHT else ImageOps.exif_transpose(image).size
    stored = shown if orientation < FIRST_ON_ITS_SIDE else shown[::-1]
    if size not in (shown, stored):
        raise UserError(
            f"has {_words(size)} pixels, its image {file.name} has {_words(shown)}; scale the mask "
            "without blending, or replace it"
        )
    # Where both have one size, a mask may be drawn on either, unless it is turned itself.
    is_on_shown = size == shown and (is_turned or size != stored)
    if orientation != UPRIGHT and not is_on_shown:
        raise UserError(
            f"has {_words(size)} pixels, as its image {file.name} before EXIF data turn it, and "
            "has none itself; save the image without these data, and turned if the mask was drawn "
            "on the turned one"
        )


def _orientation(image: Image.Image) -> int:
    """How EXIF data turn an image, from 1 to 8."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except SyntaxError:  # of EXIF data that no viewer can read
        return UPRIGHT
    return orientation if orientation in range(UPRIGHT, 9) else UPRIGHT


def _words(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def number_classes(
    masks: Tensor,
    files: Sequence[Path],
    is_train: Tensor,
    classes: Mapping[str, int] | None,
    name: str,
) -> tuple[Tensor, list[str]]:
    """Masks uint8 (N, H, W) with classes from 0 and `IGNORED`, and the name of each class.

    Args:
        files: of the masks, for messages.
        is_train: which masks are of train, bool (N,).
        classes: the value of each class by its name; None: 0 to the largest value in train.

    Raises:
        UserError: begins with `name`. Values that are no classes, or a mask without any class.
    """
    present = torch.stack([mask.flatten().bincount(minlength=LEVELS) > 0 for mask in masks])
    if classes is None:
        in_train = present[is_train, :IGNORED].any(dim=0).nonzero().flatten().tolist()
        _refuse_levels(in_train, bool(present[:, IGNORED].any()), name)
        classes = {str(value): value for value in range(max(in_train) + 1)}
        what = f"the masks of train hold 0 to {max(in_train)}"
    else:
        check_classes(classes)
        what = f"data.classes has {name_some(map(str, classes.values()))}"
    known = torch.zeros(LEVELS, dtype=torch.bool)
    known[[*classes.values()]] = True
    is_unknown = present & ~known
    is_unknown[:, IGNORED] = False
    for index, value in is_unknown.nonzero()[:1].tolist():
        raise UserError(
            f"{name}: {files[index]} holds {value}, which is no class ({what}); replace it by a "
            f"class or by {IGNORED}, which counts as none, or name it in data.classes"
        )
    for index in (~(present & known).any(dim=1)).nonzero()[:1].flatten().tolist():
        raise UserError(
            f"{name}: {files[index]} is {IGNORED} everywhere, which counts as no class; remove it "
            "and its image"
        )
    table = np.full(LEVELS, IGNORED, dtype=np.uint8)
    for index, value in enumerate(classes.values()):
        table[value] = index
    return torch.from_numpy(table[masks.numpy()]), [*map(str, classes)]


def _refuse_levels(values: Sequence[int], has_ignored: bool, name: str) -> None:
    """Raises UserError unless the values of masks may be numbers of classes."""
    if len(values) > 1 and 2 * len(values) > max(values):
        return
    named = values[:3]
    if has_ignored:  # which would silently count as none if the example left it out
        named = [*values[:2], IGNORED]
        values = [*values, IGNORED]
    example = ",".join(f"name{index}:{value}" for index, value in enumerate(named))
    raise UserError(
        f"{name}: the masks of train hold {name_some(map(str, values))}, not the numbers of "
        f"classes 0, 1 and so on ({IGNORED} counts as none unless named); name the value of "
        f"each class, as in 'data.classes={{{example}}}'"
    )


def check_classes(classes: object) -> None:
    """Raises UserError unless `data.classes` is None or has a value of its own for each name."""
    if classes is None:
        return
    values = [*classes.values()] if isinstance(classes, Mapping) else []
    is_level = [type(value) is int and 0 <= value < LEVELS for value in values]
    if len(values) < 2 or not all(is_level) or len(set(values)) < len(values):
        raise UserError(
            f"data.classes={as_typed(classes)}: must name two or more classes, each with a value "
            f"of its own from 0 to {IGNORED}, as in 'data.classes={{background:0,cell:255}}'"
        )
