"""What a report may claim: the differences that it tests, and the verdict on each.

In every slice these are, for each norm that mixes samples, the smallest size against the largest,
and each norm against the reference norm at the smallest size. This rule fixes them before any
result is known. A family is a table: one model, data set and budget. The probability that any
verdict of a family is false is at most 5 % (normexp.stats.family), over new seeds and test samples.

Cells whose recipes differ in anything but the norm, the sizes and the searched keys are not
compared. The reference is batch norm, unless the report is given another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from normexp.config.words import as_typed
from normexp.reporting.cells import SHOWN, unlike
from normexp.reporting.metric import format_interval
from normexp.reporting.slices import AXIS_WORDS, Grid, Slice
from normexp.reporting.style import base_of
from normexp.stats.family import Verdict, decide, difference
from normexp.stats.interval import LEVEL, Array, Interval

REFERENCES = ("batch", "as_built")  # unless one is named: the first that a slice has
DIFFERENCE = "difference [95 %]"
ADDED = "†"  # some of the seeds were added by a later command
NOTHING = Interval(None, None, None, LEVEL, 0)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The difference between two cells of a slice, paired by seed; positive: the first is better.

    sizes: of the first and of the second, along the axis of the slice
    gap: in the unit of the metric
    verdict: None where none is allowed; `why` says why
    num_samples: test samples; 0: not recorded for every run, so the gap is over seeds alone
    is_comparable: the two recipes are alike, so it belongs to the family
    family_size: the number of differences that share the error rate
    is_extended: seeds were added after those that the first command declared
    """

    part: Slice = field(repr=False)
    first: Grid = field(repr=False)
    second: Grid = field(repr=False)
    sizes: tuple[int, int]
    gap: Interval
    num_samples: int
    why: str
    is_comparable: bool
    is_extended: bool
    verdict: Verdict | None = None
    family_size: int = 0

    @property
    def is_along_sizes(self) -> bool:
        return self.first.norm == self.second.norm

    @property
    def norm(self) -> str:
        return self._name(self.first, 0)

    @property
    def against(self) -> str:
        return self._name(self.second, 1)

    def _name(self, grid: Grid, place: int) -> str:
        return f"{grid.norm} at {self.sizes[place]}" if self.is_along_sizes else grid.norm

    @property
    def row(self) -> dict[str, str]:
        """The difference as every table prints it."""
        metric = self.part.metric
        shown = format_interval(self.gap, metric.digits) if self.is_comparable else "-"
        shown = shown if shown.startswith("-") else f"+{shown}"
        verdict = (self.verdict or "-") + ADDED * (self.is_extended and self.verdict is not None)
        row = {"norm": self.norm, "against": self.against, DIFFERENCE: shown, "verdict": verdict}
        return row | {"why": self.why, "n": str(self.gap.n or "-")}


def compare(slices: Sequence[Slice], reference: str | None = None) -> list[Comparison]:
    """Every comparison of the slices of one report, with its verdict.

    reference: norm that the others are compared with where it was run; None: batch norm
    """
    comparisons = [one for part in slices for one in _comparisons_of(part, reference)]
    sizes = Counter(one.part.family for one in comparisons if one.is_comparable)
    for part in slices:  # the choice of the best norms: k - 1 one-sided tests, see ranking.py
        sizes[part.family] += math.ceil(max(len(part.compared) - 2, 0) / 2)
    return [judge(one, sizes[one.part.family]) for one in comparisons]


def judge(comparison: Comparison, family_size: int) -> Comparison:
    """The comparison with its verdict, if one is allowed."""
    known = replace(comparison, family_size=family_size)
    if comparison.why:
        return known
    margin = comparison.part.metric.tolerance
    verdict = decide(comparison.gap, margin=margin, family_size=family_size)
    words = [f"{one.norm}: {one.lost}" for one in (known.first, known.second) if one.lost]
    words += ["over seeds alone"] if known.part.has_samples and not known.num_samples else []
    if known.gap.low is None:
        return replace(known, why="one seed" if known.gap.n == 1 else "same value for every seed")
    return replace(known, verdict=verdict, why="; ".join(dict.fromkeys(words)))


def reference_of(norms: Sequence[str], wanted: str | None = None) -> str:
    """The norm that the others are compared with; norms: in the order of figures."""
    names = (wanted or REFERENCES[0], *REFERENCES)
    known = [norm for name in names for norm in norms if name in (norm, base_of(norm))]
    return known[0] if known else norms[0]


def _comparisons_of(part: Slice, wanted: str | None) -> Iterator[Comparison]:
    """Comparisons of a slice: along the sizes, then with the reference."""
    for norm, line in part.lines.items():
        size, largest = min(line), max(line)
        if len(line) > 1 and norm not in part.independent:
            yield compare_grids(part, line[size], line[largest], (size, largest))
    if grids := part.compared:
        reference = grids[reference_of(list(grids), wanted)]
        for grid in grids.values():
            if grid is not reference:
                yield compare_grids(part, grid, reference, (part.at, part.at))


def compare_grids(part: Slice, first: Grid, second: Grid, sizes: tuple[int, int]) -> Comparison:
    """The comparison of two grids, not yet judged."""
    alike = ["lr"] if first.rates == second.rates and len(first.rates) > 1 else []
    different = unlike(first.best, second.best, searched=alike)
    if len(first.rates) > 1 or len(second.rates) > 1:
        different.pop("lr", None)
        if first.rates != second.rates:
            different["lr"] = ("", "")
    grids = (first, second)
    why = _unlike_words(different)
    if not why and any(cell.invalid for grid in grids for cell in grid.cells):
        why = "INVALID"
    a, b = paired(first, second)
    gap = NOTHING
    num_samples = a.shape[1] if a.ndim == 2 else 0
    if a.size:
        bounds = part.metric.bounds
        step = first.best.step(part.metric)
        step = (bounds[1] - bounds[0]) / num_samples if bounds and num_samples else step
        gap = difference(a, b, step=step, limit=part.metric.limit)
    is_comparable = not why
    why = why or next(filter(None, (grid.why_incomplete for grid in grids)), "")
    why = why or ("" if a.size else "no seed in common")
    is_extended = any(cell.is_extended for grid in grids for cell in grid.cells)
    return Comparison(part, first, second, sizes, gap, num_samples, why, is_comparable, is_extended)


def paired(first: Grid, second: Grid) -> tuple[Array, Array]:
    """Outcomes of the same shape, higher is better, at the seeds that both have.

    A norm that a grid tunes is compared at all of its seeds, or not at all.
    """
    seeds = sorted({*first.seeds} & {*second.seeds})
    if any(grid.fit and grid.seeds != seeds for grid in (first, second)):
        return np.empty(0), np.empty(0)
    a, b = (grid.outcomes[[grid.seeds.index(seed) for seed in seeds]] for grid in (first, second))
    if a.shape == b.shape:
        return a, b
    return (a if a.ndim == 1 else a.mean(axis=1)), (b if b.ndim == 1 else b.mean(axis=1))


def _unlike_words(different: dict[str, tuple[object, object]]) -> str:
    """`not compared: optim.weight_decay 0.0005 and 0`; empty if nothing differs."""
    if not different:
        return ""
    words = [
        "lr not searched alike"
        if key == "lr" and values == ("", "")
        else f"{SHOWN.get(key, key)} {as_typed(values[0])} and {as_typed(values[1])}"
        for key, values in different.items()
    ]
    more = f" and {len(words) - 2} more" if len(words) > 2 else ""
    return f"not compared: {', '.join(words[:2])}{more}"


def size_words(comparison: Comparison) -> str:
    """`from norm batch size 32 to 2`."""
    small, large = comparison.sizes
    return f"from {AXIS_WORDS[comparison.part.axis]} {large} to {small}"
