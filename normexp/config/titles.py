"""What cells and durations are called, in tables and in the history."""

from __future__ import annotations

import re
from collections.abc import Sequence

from normexp.config.rules import in_identity, sees_validations
from normexp.config.spec import CellSpec

SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")


def title_of(cell: CellSpec) -> str:
    """The norm, the sizes and the typed overrides of a cell.

    For example `norm=batch batch_size=32 norm_batch_size=2 epochs=3`. Independent of the other
    cells of the command; leaves out the study, folders and seeds.
    """
    if cell.cfg is None:
        return " ".join(text for text in cell.overrides if not _is_apart(text)) or cell.title
    said = {"norm": cell.choices["norm"], **{key: cell.cfg[key] for key in SIZES}}
    words = [f"{key}={value}" for key, value in said.items() if value is not None]
    typed = [text for text in cell.overrides if _key_of(text) not in said]
    own = {"val_every_epochs"} if sees_validations(cell.cfg) else set()
    typed = [text for text in typed if _key_of(text) in own or not _is_apart(text)]
    return " ".join([*words, *typed])


def _key_of(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _is_apart(text: str) -> bool:
    """True if an override sets where, when or how a cell is trained, but not what."""
    key = re.split(r"[/@]", _key_of(text))[0]
    return key == "trainer" or not in_identity(key)


def tell_apart(titles: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the words that all titles share, and each title without them. Norms are kept."""
    rows = [title.split() for title in titles]
    if len(rows) < 2:
        return "", list(titles)
    shared = [
        word
        for word in rows[0]
        if not word.startswith("norm=") and all(word in row for row in rows)
    ]
    own = [" ".join(word for word in row if word not in shared) for row in rows]
    return " ".join(shared), [text or title for text, title in zip(own, titles, strict=True)]


def spoken(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2 h 05 min`."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
