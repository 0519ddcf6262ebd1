"""The colour, marker, dash and order of each norm, the same in every figure.

Colours after Okabe and Ito (2008), extended by muted colours of similar lightness, all with a
contrast of 2.4 or more on white and on the dark page. Markers and dashes differ too, so that
figures can be read in grey.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

ORDER = ("batch", "layer", "instance", "group", "rms", "layer2d", "none")


@dataclass(frozen=True)
class Style:
    """How a norm is drawn; `marker` is a symbol of Vega, `dash` lengths in pixels."""

    colour: str
    marker: str
    dash: tuple[int, int]


_STAR = "M0,-1L0.25,-0.3L1,-0.3L0.4,0.15L0.6,0.9L0,0.45L-0.6,0.9L-0.4,0.15L-1,-0.3L-0.25,-0.3Z"
_HOURGLASS = "M-0.8,-0.8L0.8,-0.8L-0.8,0.8L0.8,0.8Z"
_BAR = "M-0.3,-1L0.3,-1L0.3,1L-0.3,1Z"
_PLANK = "M-1,-0.3L1,-0.3L1,0.3L-1,0.3Z"

SLOTS = (
    Style("#d55e00", "circle", (1, 0)),
    Style("#0072b2", "square", (6, 2)),
    Style("#cc79a7", "triangle-up", (2, 2)),
    Style("#009e73", "diamond", (8, 2)),
    Style("#56a5d9", "triangle-down", (4, 2)),
    Style("#c98a00", "cross", (10, 3)),
    Style("#7f7f7f", _BAR, (3, 3)),
    Style("#a8466e", "triangle-right", (12, 2)),
    Style("#8f8f2a", "triangle-left", (5, 5)),
    Style("#8870d0", _STAR, (7, 4)),
    Style("#a86a3d", _HOURGLASS, (2, 4)),
    Style("#3fa294", _PLANK, (9, 5)),
)


def order_norms(labels: Iterable[str]) -> list[str]:
    """Norms of ORDER first, then others by name; numbers in names sort by value."""
    return sorted(set(labels), key=_rank)


def assign_styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style per label, in order. Norms of ORDER always have their own; others take free styles.

    Beyond 12 norms the colours repeat, with another marker and dash.
    """
    ordered, heirs = order_norms(labels), {}
    for label in ordered:  # the first variant, as `group num_groups=4`, inherits the norm's style
        if base_of(label) in ORDER:
            heirs.setdefault(base_of(label), label)
    slots = {label: ORDER.index(base) for base, label in heirs.items()}
    # The colours of norms of ORDER that are absent are taken last.
    free = sorted(set(range(len(SLOTS))) - set(slots.values()), key=lambda s: (s < len(ORDER), s))
    styles = {}
    for label in ordered:
        turn, place = divmod(len(styles.keys() - slots.keys()), len(free))
        styles[label] = _style(slots[label], 0) if label in slots else _style(free[place], turn)
    return styles


def _style(slot: int, turn: int) -> Style:
    """The slot's style in turn 0; later turns keep its colour with marker and dash of others."""
    marker, dash = (SLOTS[(slot + step * turn) % len(SLOTS)] for step in (5, 7))
    return Style(SLOTS[slot].colour, marker.marker, dash.dash)


def base_of(label: str) -> str:
    """The norm in a label: `group` of `group num_groups=4` and of `group · before`."""
    return re.split(r"[ ·]", label)[0]


def _rank(label: str) -> tuple[int, list[tuple[int, float, str]]]:
    base = base_of(label)
    place = ORDER.index(base) if base in ORDER else len(ORDER)
    pieces = re.split(r"(\d+(?:\.\d+)?)", label)
    return place, [(0, float(p), "") if p[:1].isdigit() else (1, 0.0, p) for p in pieces if p]
