"""The user's own images: a folder for each split, or class folders that are split here."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normexp.data.augment import Augmentation
from normexp.data.dataset import Data, Examples
from normexp.data.images import build_image_data
from normexp.data.pixels import decode_images
from normexp.data.sources import split_off_test
from normexp.errors import UserError, first_line
from normexp.records.files import open_atomic

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

log = logging.getLogger(__name__)

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
MIN_STD = 0.001  # a grey level is 0.004
SPLITS = {
    "train": "train|training",
    "val": "val|valid|validation|dev",
    "test": "test|testing|eval|evaluation",
}
DECODER = 2  # raised when files are decoded to other pixels, so that older caches are left alone


def load_image_folder(
    *,
    root: str,
    size: int | None,
    data_dir: str,
    val_fraction: float,
    split_seed: int,
    augmentation: Augmentation | None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Data:
    """RGB images, uint8 (N, 3, H, W), decoded once and cached under data_dir/cache.

    Args:
        root: folder with train/<class>/, test/<class>/ and perhaps val/<class>/, see `find_splits`.
            Without val/, val is split off train; without test/, val/ is the test split. If it has
            none of these, every folder is a class, and a fifth of each is the test split.
        size: side in pixels to which images are scaled and centre-cropped; None leaves images as
            they are, which must then have one size.
        mean, std: of each channel, in 0..1 units, by which images are normalized; None: those of
            the training images. Networks that start from weights need those of their training.

    Raises:
        UserError: bad or incomplete mean and std, a missing folder, an empty class, classes that
            differ between splits, files that cannot be decoded, images of several sizes or of
            hardly any contrast, too little memory.
    """
    if size is not None and size < 1:
        raise UserError(f"data.size={size} must be positive; try data.size=32")
    moments, name = _given_moments(mean, std), f"data.root={root}"
    folder = Path(root).expanduser()
    splits = find_splits(folder, name)
    listings = [_list_images(name, split) for split in [*splits.values()] or [folder]]
    classes = listings[0].classes
    _check_classes(name, splits, listings)
    files = [Path(file) for listing in listings for file, _ in listing.samples]
    images = _load_or_decode(folder, files, size, Path(data_dir).expanduser(), name)
    counts = [len(listing) for listing in listings]
    targets = torch.tensor([target for listing in listings for target in listing.targets])
    parts = [*map(Examples, images.split(counts), targets.split(counts))]
    of = dict(zip(splits, parts, strict=True)) if splits else _split_off_test(name, parts[0])
    data = build_image_data(
        "image_folder",
        of["train"],
        of["test"],
        val=of.get("val"),
        num_classes=len(classes),
        class_names=classes,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )
    return data if moments is None else dataclasses.replace(data, **moments)


def _given_moments(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> dict[str, Any] | None:
    """The fields of `Data` that hold a mean and standard deviation; None if both are None."""
    if mean is None and std is None:
        return None
    for key, values, least in (("mean", mean, 0), ("std", std, MIN_STD)):
        numbers = values if isinstance(values, Sequence) else []
        if len(numbers) != 3 or not all(
            isinstance(number, int | float) and least <= number <= 1 for number in numbers
        ):
            given, example = (str(v).replace(" ", "") for v in (values, IMAGENET[key]))
            raise UserError(
                f"data.{key}={given}: must be three numbers from {least:g} to 1, of the channels "
                f"red, green and blue, as ImageNet's data.{key}={example}"
            )
    assert mean is not None and std is not None
    return {"mean": tuple(mean), "std": tuple(std)}


def find_splits(root: Path, name: str) -> dict[str, Path]:
    """The folders of train, test and maybe val, by split; empty if `root` holds classes instead.

    Such a folder has class folders, and is named as in `SPLITS`, in any case, also as train_set.

    Raises:
        UserError: begins with `name`. Two folders of one split; no train, or nothing to test on.
    """
    splits: dict[str, Path] = {}
    folders = _subfolders(root)
    for folder in folders:
        named = [split for split, words in SPLITS.items() if _is_split(words, folder.name)]
        if not named or not _subfolders(folder):
            continue
        if (other := splits.get(named[0])) is not None:
            raise UserError(f"{name} has both {other.name}/ and {folder.name}/; keep one")
        splits[named[0]] = folder
    if not splits:
        return {}
    if "train" not in splits or len(splits) == 1:
        (first, *_) = splits.values()
        raise UserError(
            f"{name} has class folders in {' and '.join(f.name for f in splits.values())} alone; "
            "it needs train/ and test/. To split the images of one folder, name it: "
            f"data.root={first}"
        )
    if "test" not in splits:
        splits["test"] = splits.pop("val")
        log.info(
            "%s has no test/: %s/ is the test split, val is split off train",
            name,
            splits["test"].name,
        )
    if others := [folder.name for folder in folders if folder not in splits.values()]:
        log.info("%s: %s is not read", name, ", ".join(others))
    return {split: splits[split] for split in SPLITS if split in splits}


def _is_split(words: str, folder: str) -> bool:
    return bool(re.fullmatch(rf"({words})[\W_]*(set|data|images?)?", folder, re.IGNORECASE))


def _subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones; none if it is no folder."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _check_classes(name: str, splits: dict[str, Path], listings: Sequence[ImageFolder]) -> None:
    """Refuses classes that differ between splits, a single class, and splits taken for classes."""
    first, *others = listings
    for folder, listing in zip([*splits.values()][1:], others, strict=True):
        if differing := sorted(set(first.classes) ^ set(listing.classes)):
            train = splits["train"].name
            where = train if differing[0] in first.classes else folder.name
            raise UserError(
                f"{name}: class {differing[0]} is in {where}/ only; {train}/ and {folder.name}/ "
                "need the same class folders"
            )
    if len(first.classes) == 1:
        raise UserError(
            f"{name} has one class, {first.classes[0]}, which leaves nothing to predict; if this "
            f"folder holds the classes, or train/ and test/, name it: {name}/{first.classes[0]}"
        )
    split = re.compile(rf"(?<![a-z])({'|'.join(SPLITS.values())})(?![a-z])", re.IGNORECASE)
    if all(map(split.search, first.classes)):
        raise UserError(
            f"{name}: the classes would be {', '.join(first.classes)}, named like splits; "
            "put the images into train/<class>/ and test/<class>/, or rename the folders"
        )


def _list_images(name: str, folder: Path) -> ImageFolder:
    """The images of each class, without hidden files and folders."""
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    suffixes = (*IMG_EXTENSIONS, ".gif", ".jfif")
    skipped: Counter[str] = Counter()

    class Listing(ImageFolder):
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            names, _ = super().find_classes(directory)
            names = [name for name in names if not name.startswith(".")]
            return names, {name: target for target, name in enumerate(names)}

    def is_image(file: str) -> bool:
        name = os.path.basename(file).lower()
        if name.startswith("."):
            return False
        if not name.endswith(suffixes):
            skipped[os.path.splitext(name)[1] or name] += 1
            return False
        return True

    try:
        listing = Listing(folder, is_valid_file=is_image)
    except OSError as error:
        raise UserError(
            f"{name}: {first_line(error)}; it needs images ({' '.join(suffixes)}) in <class>/, or "
            "in train/<class>/ and test/<class>/"
        ) from error
    if skipped:
        log.info("%s: %d files are not read (%s)", name, skipped.total(), ", ".join(skipped))
    return listing


def _split_off_test(name: str, images: Examples) -> dict[str, Examples]:
    """Train and test of a folder without these, see `split_off_test`; the log says so."""
    train, test = (
        Examples(images.inputs[part], images.targets[part])
        for part in split_off_test(images.targets)
    )
    if len(test.targets.unique()) < len(train.targets.unique()):
        raise UserError(
            f"{name}: a class has fewer than three images, too few to keep any for the test split; "
            "add some"
        )
    log.info(
        "%s has no train/ and test/: a fifth of each class is the test split, the same in every "
        "command (%d of %d images)",
        *(name, len(test), len(images)),
    )
    return {"train": train, "test": test}


def _load_or_decode(
    root: Path, files: list[Path], size: int | None, data_dir: Path, name: str
) -> Tensor:
    """The images of `files`, uint8 (N, 3, H, W), from the cache unless a file has changed."""
    digest = hashlib.sha256(f"{DECODER}|{root.resolve()}|{size}".encode(errors="surrogateescape"))
    try:
        for file in files:
            status = file.stat()
            line = f"\n{file.relative_to(root)}|{status.st_size}|{status.st_mtime_ns}"
            digest.update(line.encode(errors="surrogateescape"))
    except OSError as error:  # a link that leads nowhere
        raise UserError(
            f"{name}: {error.filename}: {error.strerror}; replace or remove it"
        ) from error
    path = data_dir / "cache" / f"{digest.hexdigest()[:16]}.pt"
    with suppress(Exception):  # missing, or torn by a full disk: torch raises many types
        return torch.load(path, weights_only=True)
    images = decode_images(files, size, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as file:
            torch.save(images, file)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        log.warning("cannot cache the decoded images in %s (%s)", path, error)
    return images
