"""Files beside the images of a class that are made from them: masks, thumbnails, copies.

They are found by what they share with an image, its name, and where names alone may coincide, as
those of numbered frames do, by what they show.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from PIL import Image

LEAST_SHARE = 0.1  # of the images that have a NAME_word beside them
LEAST_PAIRS = 3
MOST_TRIED = 5  # pairs of files that are looked at
FLAT = 0.95  # share of a mask's pixels that have its four most frequent of 32 grey levels
ALIKE = 0.9  # correlation of a picture and its thumbnail
WORD = re.compile(r"[^\W\d_]{2,}")  # says what a file is; numbers and letters only count


def find_companions(files: Sequence[str], folder: str) -> dict[str, str]:
    """The kind of each file that is made from another file of its class: `NAME_mask`, `thumbs/`.

    Args:
        files: of one class, below its `folder`.
    """
    kinds = _in_folders_of_files(files, folder)
    rest = [file for file in files if file not in kinds]
    kinds |= _named_with_a_word(rest)
    rest = [file for file in rest if file not in kinds]
    return kinds | _same_names(rest, folder)


def _in_folders_of_files(files: Sequence[str], folder: str) -> dict[str, str]:
    """Files in a folder that is named as an image: `@eaDir/cat.jpg/thumbnail.jpg`."""
    names = set(map(os.path.basename, files))
    kinds = {}
    for file in files:
        places = file.removeprefix(folder).split(os.sep)[1:-1]
        if not names.isdisjoint(places):
            kinds[file] = f"{places[0]}/"
    return kinds


def _named_with_a_word(files: Sequence[str]) -> dict[str, str]:
    """Files that have the name of an image and a word: `1_mask`, `mask_1`, `1_mask_2`.

    Only words that come with many images: `cat.jpg` and `cat_asleep.jpg` may both be images.
    """
    stems = {file: _stem(file) for file in files}
    known = set(stems.values())
    kinds_of = {stem: _kinds(stem, known) for stem in known}
    num_images = sum(not kinds for kinds in kinds_of.values())
    counts = Counter(kind for kinds in kinds_of.values() for kind in kinds)
    least = max(LEAST_PAIRS, LEAST_SHARE * num_images)
    frequent = [kind for kind, count in counts.items() if count >= least]
    found = {}
    for file, stem in stems.items():
        for kind in kinds_of[stem]:
            # NAME_mask_2 counts with NAME_mask
            if any(kind.startswith(k) or kind.endswith(k) for k in frequent):
                found[file] = kind
    return found


def _kinds(stem: str, known: set[str]) -> list[str]:
    """`NAME_mask` for `1_mask` if `1` is known."""
    kinds = []
    for end in range(1, len(stem)):
        for name, rest, kind in (
            (stem[:end], stem[end:], f"NAME{stem[end:]}"),
            (stem[end:], stem[:end], f"{stem[:end]}NAME"),
        ):
            if name not in known or not WORD.search(rest):
                continue
            is_within_word = stem[end - 1 : end + 1].isalpha()
            if not is_within_word:
                kinds.append(kind)
    return kinds


def _same_names(files: Sequence[str], folder: str) -> dict[str, str]:
    """Files that have the name of an image in another folder or format, and look made from it.

    Folders and names that differ in a number are a series, such as the frames of several films.
    """
    groups: dict[str, dict[str, str]] = defaultdict(dict)  # a file of each stem, by its kind
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)  # all files of a kind and stem
    for file in files:
        place, name = os.path.split(file.removeprefix(folder + os.sep))
        stem, ending = os.path.splitext(name)
        kind = re.sub(r"\d+", "", os.path.join(place, "*")) + ending.lower()
        groups[kind].setdefault(stem, file)
        alike[kind, stem].append(file)
    kinds: dict[str, str] = {}
    ordered = sorted(groups, key=lambda group: -len(groups[group]))
    for index, group in enumerate(ordered):
        for other in ordered[:index]:
            shared = sorted(groups[group].keys() & groups[other].keys())
            if len(shared) < max(LEAST_PAIRS, len(groups[group]) / 2):
                continue
            made = _which_is_made(groups, shared[:MOST_TRIED], other, group)
            if made is not None:
                for stem in shared:
                    kinds |= dict.fromkeys(alike[made, stem], made)
    return kinds


def _which_is_made(
    groups: Mapping[str, Mapping[str, str]], stems: Sequence[str], first: str, second: str
) -> str | None:
    """The group that looks made from the other, in all of these files; None if neither does."""
    for looks_made in (_is_mask, _is_smaller):
        for made, source in ((second, first), (first, second)):
            if all(looks_made(groups[made][stem], groups[source][stem]) for stem in stems):
                return made
    return None


def _is_mask(file: str, image: str) -> bool:
    """True if a file has few grey levels and the image has many."""
    with suppress(Exception), Image.open(image) as a, Image.open(file) as b:
        return _flatness(b) >= FLAT > _flatness(a)
    return False


def _is_smaller(file: str, image: str) -> bool:
    """True if a file shows the same as the image, and is not larger."""
    with suppress(Exception), Image.open(image) as a, Image.open(file) as b:
        return b.width * b.height <= a.width * a.height and _likeness(a, b) >= ALIKE
    return False


def _flatness(image: Image.Image) -> float:
    """The share of the four most frequent of 32 grey levels."""
    counts = np.bincount(np.asarray(image.convert("L")).ravel() // 8, minlength=32)
    return float(np.sort(counts)[-4:].sum() / counts.sum())


def _likeness(first: Image.Image, second: Image.Image) -> float:
    small = [np.asarray(image.convert("L").resize((16, 16))) for image in (first, second)]
    a, b = (grey.ravel() - grey.mean() for grey in small)
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0


def _stem(file: str) -> str:
    return os.path.splitext(os.path.basename(file))[0]
