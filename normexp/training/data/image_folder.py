"""The user's own images: a folder for each split, or class folders that are split here."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.ImageFile import StubImageFile
from torch import Tensor

from normexp.errors import UserError
from normexp.training.data.augment import Augmentation
from normexp.training.data.companions import find_companions
from normexp.training.data.dataset import Data, Examples, read_moment
from normexp.training.data.images import build_image_data
from normexp.training.data.pixels import decode_images
from normexp.training.data.sources import split_off_test
from normexp.training.records.files import describe, open_atomic, read_path
from normexp.words import name_some

log = logging.getLogger(__name__)

SPLIT = re.compile(
    r"(?<![a-z])(?:(?P<train>train|training)|(?P<val>val|valid|validation|dev)"
    r"|(?P<test>test|testing|eval|evaluation))[\W_]*(?:set|data|images?)?(?![a-z])",
    re.IGNORECASE,
)
MIN_STD = 0.001  # of those that are typed; a grey level is 0.004
UNREAD = (".", "__")  # begin the names of hidden folders, and of those of programs: __MACOSX
DECODER = 2  # a change of the decoded pixels raises it, so that no older cache is read


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
    if mean is not None or std is not None:
        read_moment("mean", mean, 3)
        read_moment("std", std, 3, MIN_STD)
    name = f"data.root={root}"
    folder = read_path("data.root", root)
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{name} is a file; unpack it, and name the folder")
        folders = find_splits(folder, name) or {"train": folder}
        classes = _read_classes(folders, name)
        samples = _list_images(folders, classes, name)
        files = [Path(file) for listed in samples.values() for file, _ in listed]
        digest = _digest_files(files, size)
    except OSError as error:
        raise UserError(f"{name}: {describe(error)}") from error
    cache = read_path("data_dir", data_dir) / "cache" / f"{digest}.pt"
    images = _load_or_decode(cache, files, size, name)
    targets = torch.tensor([target for listed in samples.values() for _, target in listed])
    counts = [len(listed) for listed in samples.values()]
    examples = map(Examples, images.split(counts), targets.split(counts))
    splits: dict[str, Any] = dict(zip(samples, examples, strict=True))
    if "test" not in splits:
        splits = _split_off_test(splits["train"], name)
    data = build_image_data(
        "image_folder",
        **splits,
        num_classes=len(classes),
        class_names=classes,
        val_fraction=val_fraction,
        split_seed=split_seed,
        augmentation=augmentation,
    )
    counts = ", ".join(f"{len(images)} {split}" for split, images in data.splits.items())
    log.info("%s: %d classes (%s); images: %s", name, len(classes), name_some(classes), counts)
    if mean is None and std is None:
        return data
    return dataclasses.replace(data, mean=mean, std=std)


def find_splits(root: Path, name: str) -> dict[str, Path]:
    """The folders of train, test and maybe val, by split; empty if `root` holds classes instead.

    The folder of a split has class folders, and is named by a word of `SPLIT`. The word may be part
    of the name, as in photos_train and photos_test, if each folder that has folders has one, or if
    those of train and test are named alike but for it.

    Raises:
        UserError: begins with `name`. Two folders of one split; no train, or nothing to test on.
    """
    splits: dict[str, Path] = {}
    folders = _subfolders(root)
    nested = [folder for folder in folders if _subfolders(folder)]
    words = {_split_of(folder) for folder in nested}
    stems = {SPLIT.sub("", folder.name) for folder in nested if _split_of(folder)}
    may_be_part = None not in words or (words >= {"train", "test"} and len(stems) == 1)
    for folder in nested:
        split = _split_of(folder)
        if split is None or not (may_be_part or SPLIT.fullmatch(folder.name)):
            continue
        if split in splits:
            raise UserError(f"{name} has both {splits[split].name}/ and {folder.name}/; keep one")
        splits[split] = folder
    if not splits:
        return {}
    if "train" not in splits or len(splits) == 1:
        names = " and ".join(f"{folder.name}/" for folder in splits.values())
        raise UserError(
            f"{name} has {names}, and needs train/ and test/; rename the folders, or to split the "
            f"images of one, name it: data.root={next(iter(splits.values()))}"
        )
    if "test" not in splits:
        splits["test"] = splits.pop("val")
        log.info(
            "%s has no test/: %s/ is the test split, val is split off train",
            name,
            splits["test"].name,
        )
    if unread := [folder.name for folder in folders if folder not in splits.values()]:
        log.info("%s: %s is not read", name, ", ".join(unread))
    return splits


def _split_of(folder: Path) -> str | None:
    """The split that a folder is named after, if any."""
    found = SPLIT.search(folder.name)
    return found.lastgroup if found else None


def _subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones and those of programs."""
    folders = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(UNREAD)]
    return sorted(folders, key=_class_of)


def _read_classes(folders: Mapping[str, Path], name: str) -> list[str]:
    """The names of the class folders.

    Raises:
        UserError: classes that differ between splits, a single class, or classes named like splits.
    """
    train = folders["train"]
    classes = list(dict.fromkeys(map(_class_of, _subfolders(train))))
    for split in folders.values():
        others = set(map(_class_of, _subfolders(split)))
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
    if all(map(_split_of, _subfolders(train))):
        raise UserError(
            f"{name}: the classes would be {', '.join(classes)}, named like splits; "
            "put the images into train/<class>/ and test/<class>/, or rename the folders"
        )
    for folder in _subfolders(train):
        if {"train", "test"} <= set(map(_split_of, _subfolders(folder))):
            raise UserError(
                f"{name}: class {folder.name} has a train/ and a test/ of its own; put them around "
                "the classes, as in train/<class>/ and test/<class>/"
            )
    return classes


def _is_stub(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, StubImageFile)


def _class_of(folder: Path) -> str:
    """The name of a class folder in one form: é may be one character, or e and an accent."""
    return _in_one_form(folder.name)


def _in_one_form(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _list_images(
    folders: Mapping[str, Path], classes: Sequence[str], name: str
) -> dict[str, list[tuple[str, int]]]:
    """The files of each split with their targets, without hidden ones.

    A folder within a class folder belongs to its class.

    Raises:
        UserError: a class without images in a split.
    """
    kinds = _readable_kinds()
    skipped: Counter[str] = Counter()
    companions: Counter[str] = Counter()
    nested: Counter[str] = Counter()
    samples = {}
    for split, folder in folders.items():
        listed: list[tuple[str, int]] = []
        inner: dict[str, Counter[str]] = {}  # folders within class folders, by class folder
        for class_folder in _subfolders(folder):
            files = []
            for place, file in _walk(class_folder):
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
            target = classes.index(_class_of(class_folder))
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
        log.info("%s: %d files are not read (%s)", name, skipped.total(), name_some(skipped))
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


def _readable_kinds() -> set[str]:
    """The endings of image files that Pillow reads by itself."""
    readable = Image.registered_extensions()
    # Pillow knows these formats, and needs another program to read them.
    stubs = {name for name, (kind, _) in Image.OPEN.items() if _is_stub(kind)}
    return {suffix for suffix, kind in readable.items() if kind in Image.OPEN.keys() - stubs}


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


def _walk(folder: Path) -> list[tuple[str, str]]:
    """The places and names of all files, also behind links; a folder is entered once.

    Hidden files, and folders as in `_subfolders`, are left out. The order is the same for both
    forms of a name.
    """
    entered: set[str] = set()
    files = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(UNREAD)]
        real = os.path.realpath(place)
        if real in entered:  # a link to a folder around it
            folders.clear()
            continue
        entered.add(real)
        files += [(place, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda file: [*map(_in_one_form, file)])


def _split_off_test(images: Examples, name: str) -> dict[str, Examples]:
    """Splits the images of a folder without train/ and test/, and logs it."""
    train, test = map(images.subset, split_off_test(images.targets))
    if len(test.targets.unique()) < len(train.targets.unique()):
        raise UserError(
            f"{name}: a class has fewer than three images, too few to keep any for the test split; "
            "add some"
        )
    log.info(
        "%s has no train/ and test/: a fifth of each class is the test split (%d of %d images)",
        name,
        len(test),
        len(images),
    )
    return {"train": train, "test": test}


def _digest_files(files: Sequence[Path], size: int | None) -> str:
    """A digest of what decides the decoded images: the contents of the files, in their order.

    Size and time would not do: a file may be replaced by another of the same. Hashing takes a few
    hundredths of the time of decoding.
    """
    digest = hashlib.sha256(f"{DECODER}|{size}".encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _load_or_decode(cache: Path, files: list[Path], size: int | None, name: str) -> Tensor:
    """The images of `files`, uint8 (N, 3, H, W), from the cache if it is there."""
    with suppress(Exception):  # a cache that is missing or cut short: torch raises many types
        return torch.load(cache, weights_only=True)
    images = decode_images(files, size, name)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(cache) as file:
            torch.save(images, file)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        log.warning("cannot cache the decoded images in %s (%s)", cache, error)
    return images
