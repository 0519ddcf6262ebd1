"""What cells are called where those of several commands stand side by side. No torch, no Hydra."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normexp.records.identity import NOT_TRAINING

if TYPE_CHECKING:
    from normexp.studies.outcome import Composed

SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")


def title_of(cell: Composed) -> str:
    """What a cell is: norm, sizes, and what else was typed of its training.

    `norm=batch batch_size=32 norm_batch_size=2 epochs=3`, whatever the other cells of its command
    are, and without the study, the folders and the seeds.
    """
    if cell.cfg is None:
        return " ".join(text for text in cell.overrides if not _is_apart(text)) or cell.title
    said = {"norm": cell.choices["norm"], **{key: cell.cfg[key] for key in SIZES}}
    words = [f"{key}={value}" for key, value in said.items() if value is not None]
    typed = [text for text in cell.overrides if _key_of(text) not in said]
    return " ".join([*words, *(text for text in typed if not _is_apart(text))])


def _key_of(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _is_apart(text: str) -> bool:
    """Whether an override says where, when or how a cell is trained, and not what."""
    key = _key_of(text)
    head = re.split(r"[./@]", key)[0]
    return head in NOT_TRAINING or (head == "trainer" and key != "trainer.precision")


def shared_words(titles: Sequence[str]) -> str:
    """What all titles of one cell say; `norm=none` where it was asked for at several sizes."""
    first, *others = [title.split() for title in titles]
    return " ".join(word for word in first if all(word in other for other in others)) or titles[0]


def tell_apart(titles: Sequence[str]) -> tuple[str, list[str]]:
    """The words that all titles share, and each title without them; norms stay where they are."""
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
