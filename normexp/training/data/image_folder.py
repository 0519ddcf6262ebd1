"""The user's own images: a folder for each split, or class folders that are split here."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.training.data.augment import Augmentation
from normexp.training.data.companions import find_companions
from normexp.training.data.dataset import Data, Examples, read_moment
from normexp.training.data.folders import (
    find_splits,
    name_of,
    readable_kinds,
    split_of,
    subfolders,
    walk,
)
from normexp.training.data.images import build_image_data
from normexp.training.data.masks import (
    Pair,
    check_classes,
    decode_masks,
    find_pairs,
    number_classes,
)
from normexp.training.data.pixels import decode_images
from normexp.training.data.sources import split_off_test
from normexp.training.records.files import describe, open_atomic, read_path
from normexp.words import format_count, name_some

log = logging.getLogger(__name__)

MIN_STD = 0.001  # of those that are typed; a grey level is 0.004
DECODER = 3  # a change of what is decoded, or refused, raises it, so that no older cache is read


Splits = dict[str, Examples]


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
    classes: Mapping[str, int] | None = None,
) -> Data:
    """RGB images, uint8 (N, 3, H, W), decoded once and cached under data_dir/cache.

    Args:
        root: folder with train/<class>/, test/<class>/ and perhaps val/<class>/, see `find_splits`.
            Without val/, val is split off train; without test/, val/ is the test split. If it has
            none of these, every folder is a class, and a fifth of each is the test split. Folders
            of masks beside those of images make it segmentation, see `find_pairs`.
        size: side in pixels to which images are scaled and centre-cropped; None leaves images as
            they are, which must then have one size. Masks are scaled without blending.
        mean, std: of each channel, in 0..1 units, by which images are normalized; None: those of
            the training images. Networks that start from weights need those of their training.
        classes: the value in masks of each class by its name; None: 0 to the largest in train.

    Raises:
        UserError: bad or incomplete mean and std, a missing folder, an empty class, classes that
            differ between splits, files that cannot be decoded, images of several sizes or of
            hardly any contrast, too little memory, masks that do not fit (see masks.py).
    """
    if size is not None and size < 1:
        raise UserError(f"data.size={size} must be positive; try data.size=32")
    if mean is not None or std is not None:
        read_moment("mean", mean, 3)
        read_moment("std", std, 3, MIN_STD)
    check_classes(classes)
    name = f"data.root={root}"
    folder = read_path("data.root", root)
    cache = Cache(read_path("data_dir", data_dir) / "cache", size, name)
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{name} is a file; unpack it, and name the folder")
        folders = find_splits(folder, name) or {"train": folder}
        if pairs := find_pairs(folder, folders, name):
            splits, names = _read_masks(pairs, classes, cache)
        elif classes is not None:
            raise UserError(f"data.classes: {name} has no folder of masks; drop the key")
        else:
            splits, names = _read_class_folders(folders, cache)
    except OSError as error:
        raise UserError(f"{name}: {describe(error)}") from error
    if "test" not in splits:
        splits = _split_off_test(splits["train"], name)
    data = build_image_data(
        "image_folder",
        splits["train"],
        splits["test"],
        val=splits.get("val"),
        num_classes=len(names),
        class_names=names,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )
    counts = ", ".join(f"{len(images)} {split}" for split, images in data.splits.items())
    log.info("%s: %d classes (%s); images: %s", name, len(names), name_some(names), counts)
    if mean is None and std is None:
        return data
    return dataclasses.replace(data, mean=mean, std=std)


def _read_class_folders(folders: Mapping[str, Path], cache: Cache) -> tuple[Splits, list[str]]:
    """The images of each split with their classes, and the names of these."""
    classes = _read_classes(folders, cache.name)
    samples = _list_images(folders, classes, cache.name)
    files = [Path(file) for listed in samples.values() for file, _ in listed]
    targets = torch.tensor([target for listed in samples.values() for _, target in listed])
    counts = [len(listed) for listed in samples.values()]
    examples = map(Examples, cache.images(files).split(counts), targets.split(counts))
    return dict(zip(samples, examples, strict=True)), classes


def _read_masks(
    pairs: Mapping[str, list[Pair]], classes: Mapping[str, int] | None, cache: Cache
) -> tuple[Splits, list[str]]:
    """The images of each split with their masks, and the names of the classes."""
    listed = [pair for of_split in pairs.values() for pair in of_split]
    is_train = [split == "train" for split, of_split in pairs.items() for _ in of_split]
    images = cache.images([pair.image for pair in listed])
    files = [pair.mask for pair in listed]
    masks, names = number_classes(
        cache.masks(listed), files, torch.tensor(is_train), classes, cache.name
    )
    counts = [len(of_split) for of_split in pairs.values()]
    examples = map(Examples, images.split(counts), masks.split(counts))
    return dict(zip(pairs, examples, strict=True)), names


def _read_classes(folders: Mapping[str, Path], name: str) -> list[str]:
    """The names of the class folders.

    Raises:
        UserError: classes that differ between splits, a single class, or classes named like splits.
    """
    train = folders["train"]
    classes = list(dict.fromkeys(map(name_of, subfolders(train))))
    for split in folders.values():
        others = set(map(name_of, subfolders(split)))
        if differing := sorted(others.symmetric_difference(classes)):
            where = train if differing[0] in classes else split
            raise UserError(
                f"{name}: class {differing[0]} is in {where.name}/ only; {train.name}/ and "
                f"{split.name}/ need the same class folders"
            )
    if not classes:
        raise UserError(
            f"{name} has no class folders; it needs images in <class>/, or in train/<class>/ and "
            "test/<class>/"
        )
    if len(classes) == 1:
        raise UserError(
            f"{name} has one class, {classes[0]}, which leaves nothing to predict; if this "
            f"folder holds the classes, or train/ and test/, name it: {name}/{classes[0]}"
        )
    if all(map(split_of, subfolders(train))):
        raise UserError(
            f"{name}: the classes would be {', '.join(classes)}, named like splits; "
            "put the images into train/<class>/ and test/<class>/, or rename the folders"
        )
    for folder in subfolders(train):
        splits = set(filter(None, map(split_of, subfolders(folder))))
        if "train" in splits and len(splits) > 1:
            raise UserError(
                f"{name}: class {folder.name} has folders of splits of its own "
                f"({name_some(sorted(splits))}); put them around the classes, as in "
                "train/<class>/ and test/<class>/; for images with masks, call the two folders "
                "images/ and masks/, and each mask as its image"
            )
    return classes


def _list_images(
    folders: Mapping[str, Path], classes: Sequence[str], name: str
) -> dict[str, list[tuple[str, int]]]:
    """The files of each split with their targets, without hidden ones.

    A folder within a class folder belongs to its class.

    Raises:
        UserError: a class without images in a split.
    """
    kinds = readable_kinds()
    skipped: Counter[str] = Counter()
    companions: Counter[str] = Counter()
    nested: Counter[str] = Counter()
    samples = {}
    for split, folder in folders.items():
        listed: list[tuple[str, int]] = []
        inner: dict[str, Counter[str]] = {}  # folders within class folders, by class folder
        for class_folder in subfolders(folder):
            files = []
            for place, file in walk(class_folder):
                suffix = Path(file).suffix.lower()
                if suffix in kinds:
                    files.append(os.path.join(place, file))
                else:
                    skipped[suffix or "no ending"] += 1
            if not files:
                others = f", but other files ({name_some(skipped)})" if skipped else ""
                raise UserError(
                    f"{name} has no images in {folder.name}/{class_folder.name}/{others}; it needs "
                    "some (jpg, png, tif, webp, ...), or remove the folder"
                )
            found = find_companions(files, str(class_folder))
            companions.update(found.values())
            files = [file for file in files if file not in found]
            places = [os.path.relpath(os.path.dirname(file), class_folder) for file in files]
            inner[class_folder.name] = Counter(place for place in places if place != os.curdir)
            target = classes.index(name_of(class_folder))
            listed += [(file, target) for file in files]
            nested += inner[class_folder.name]
        _refuse_classes_within(inner, name)
        samples[split] = listed
        for file in folder.iterdir():
            if file.is_dir() and file.name.startswith("__"):
                log.warning("%s: %s/ is not read; if it is a class, rename it", name, file.name)
            if file.is_file() and file.suffix.lower() in kinds and not file.name.startswith("."):
                skipped["images beside the class folders"] += 1
    if skipped:
        files = format_count(skipped.total(), "file")
        log.info("%s: not read: %s (%s)", name, files, name_some(skipped))
    if companions:
        log.warning(
            "%s: %d files beside the images are masks, thumbnails or copies by their names (%s), "
            "and are not read; to train on them, give them names of their own",
            name,
            companions.total(),
            name_some(companions),
        )
    if nested:
        log.info(
            "%s: %d images lie in folders within class folders (%s) and count as the outer class",
            name,
            nested.total(),
            name_some(map(os.path.basename, nested)),
        )
    return samples


def _refuse_classes_within(inner: Mapping[str, Iterable[str]], name: str) -> None:
    """Raises UserError if all class folders hold the same folders, as fold1/cat and fold2/cat do.

    Args:
        inner: by class folder, the folders within it that hold images.
    """
    firsts = [{place.split(os.sep)[0] for place in places} for places in inner.values()]
    shared = set.intersection(*firsts)
    if len(shared) >= 2 and 2 * len(shared) >= len(set.union(*firsts)):
        raise UserError(
            f"{name}: {name_some(inner)} hold the same folders ({name_some(sorted(shared))}); if "
            "these are the classes, put them into one folder, or into train/ and test/; if not, "
            "name them differently in each class"
        )


def _split_off_test(images: Examples, name: str) -> Splits:
    """Splits the images of a folder without train/ and test/, and logs it."""
    is_class = images.targets.ndim == 1
    targets = images.targets if is_class else torch.zeros(len(images))  # a picture has many
    train, test = map(images.subset, split_off_test(targets))
    if is_class and len(test.targets.unique()) < len(train.targets.unique()):
        raise UserError(
            f"{name}: a class has fewer than three images, too few to keep any for the test split; "
            "add some"
        )
    log.info(
        "%s has no train/ and test/: a fifth %sis the test split (%d of %d images)",
        name,
        "of each class " if is_class else "",
        len(test),
        len(images),
    )
    return {"train": train, "test": test}


@dataclass(frozen=True)
class Cache:
    """Decoded files in a folder, until the contents of one change.

    Args:
        size: to which images are scaled.
        name: of their folder, for messages.
    """

    folder: Path
    size: int | None
    name: str

    def images(self, files: list[Path]) -> Tensor:
        """The images of `files`, uint8 (N, 3, H, W)."""
        return self._load("", files, lambda: decode_images(files, self.size, self.name))

    def masks(self, pairs: Sequence[Pair]) -> Tensor:
        """The values of masks, uint8 (N, H, W)."""
        files = [file for pair in pairs for file in pair]
        return self._load("|masks", files, lambda: decode_masks(pairs, self.size, self.name))

    def _load(self, kind: str, files: Sequence[Path], decode: Callable[[], Tensor]) -> Tensor:
        file = self.folder / f"{_digest_files(files, f'{DECODER}|{self.size}{kind}')}.pt"
        with suppress(Exception):  # a cache that is missing or cut short: torch raises many types
            return torch.load(file, weights_only=True)
        decoded = decode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_atomic(file) as opened:
                torch.save(decoded, opened)
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            log.warning("cannot cache the decoded images in %s (%s)", file, error)
        return decoded


def _digest_files(files: Sequence[Path], kind: str) -> str:
    """A digest of what decides decoded images: the contents of the files, in their order.

    Size and time would not do: a file may be replaced by another of the same. Hashing takes a few
    hundredths of the time of decoding.
    """
    digest = hashlib.sha256(kind.encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
