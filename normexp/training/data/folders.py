"""Folders of image files: those named like splits, and the files below a folder."""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from pathlib import Path

from PIL import Image
from PIL.ImageFile import StubImageFile

from normexp.errors import UserError

log = logging.getLogger(__name__)

SPLIT = re.compile(
    r"(?<![a-z])(?:(?P<train>train|training)|(?P<val>val|valid|validation|dev)"
    r"|(?P<test>test|testing|eval|evaluation))[\W_]*(?:set|data|images?)?(?![a-z])",
    re.IGNORECASE,
)
UNREAD = (".", "__")  # begin the names of hidden folders, and of those of programs: __MACOSX


def find_splits(root: Path, name: str, *, holds_files: bool = False) -> dict[str, Path]:
    """The folders of train, test and maybe val, by split; empty if `root` holds classes instead.

    The folder of a split has folders, and is named by a word of `SPLIT`. The word may be part of
    the name, as in photos_train and photos_test, if each folder that has folders has one, or if
    those of train and test are named alike but for it.

    Args:
        holds_files: the folder of a split need not have folders.

    Raises:
        UserError: begins with `name`. Two folders of one split; no train, or nothing to test on.
    """
    splits: dict[str, Path] = {}
    folders = subfolders(root)
    nested = [folder for folder in folders if holds_files or subfolders(folder)]
    words = {split_of(folder) for folder in nested}
    stems = {SPLIT.sub("", folder.name) for folder in nested if split_of(folder)}
    may_be_part = None not in words or (words >= {"train", "test"} and len(stems) == 1)
    for folder in nested:
        split = split_of(folder)
        if split is None or not (may_be_part or SPLIT.fullmatch(folder.name)):
            continue
        if split in splits:
            raise UserError(f"{name} has both {splits[split].name}/ and {folder.name}/; keep one")
        splits[split] = folder
    if not splits:
        return {}
    if "train" not in splits or len(splits) == 1:
        names = " and ".join(f"{folder.name}/" for folder in splits.values())
        only = f", or to split the images of one, name it: data.root={next(iter(splits.values()))}"
        raise UserError(
            f"{name} has {names}, and needs train/ and test/; rename the folders"
            + ("" if holds_files else only)
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


def split_of(folder: Path) -> str | None:
    """The split that a folder is named after, if any."""
    found = SPLIT.search(folder.name)
    return found.lastgroup if found else None


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones and those of programs."""
    folders = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(UNREAD)]
    return sorted(folders, key=name_of)


def name_of(folder: Path) -> str:
    """The name of a class folder in one form: é may be one character, or e and an accent."""
    return in_one_form(folder.name)


def in_one_form(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _is_stub(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, StubImageFile)


def readable_kinds() -> set[str]:
    """The endings of image files that Pillow reads by itself."""
    readable = Image.registered_extensions()
    # Pillow knows these formats, and needs another program to read them.
    stubs = {name for name, (kind, _) in Image.OPEN.items() if _is_stub(kind)}
    return {suffix for suffix, kind in readable.items() if kind in Image.OPEN.keys() - stubs}


def walk(folder: Path) -> list[tuple[str, str]]:
    """The places and names of all files, also behind links; a folder is entered once.

    Hidden files, and folders as in `subfolders`, are left out. The order is the same for both
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
    return sorted(files, key=lambda file: [*map(in_one_form, file)])
