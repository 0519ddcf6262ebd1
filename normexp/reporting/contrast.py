"""The differences that a report tests, and the one family that its verdicts belong to.

A report has one primary family (normexp.stats.family): in every slice, each norm that mixes samples
at the smallest size against itself at the largest, and each norm at the smallest size against the
reference norm. Both are declared by this rule before any result is known. Only they are said to
lose, to gain, to hold their level, or to be better, worse or tied, and the probability that any of
these sentences is false is at most 5 % for the whole report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from normexp.reporting.frame import Row, paired_values
from normexp.reporting.slices import Slice
from normexp.reporting.style import base_of
from normexp.stats.family import Verdict, decide
from normexp.stats.interval import Interval, paired_difference, paired_improvement

REFERENCE = "batch"  # the reference norm; a slice without it takes its first norm
# Kinds of a contrast by verdict: of a norm along the sizes, and of a norm with the reference.
ALONG_SIZES = {"above": "gains", "below": "loses", "within": "holds"}
WITH_REFERENCE = {"above": "better", "below": "worse", "within": "tie"}
DECIDED = (*ALONG_SIZES.values(), *WITH_REFERENCE.values())


@dataclass(frozen=True)
class Contrast:
    """The difference between two cells of a slice, paired by seed.

    first, second: their points: the smallest and the largest size of one norm, or a norm and the
        reference norm at the smallest size
    gap: first - second, positive if the first is better. A diverged run counts as the worst run of
        the slice, so that the gap is a bound: its cell is at most this good.
    is_primary: it is a member of the family
    """

    part: Slice
    first: Row
    second: Row
    gap: Interval
    is_primary: bool

    @property
    def is_along_sizes(self) -> bool:
        return self.first["norm"] == self.second["norm"]

    @property
    def has_diverged(self) -> bool:
        return bool(self.first["diverged"] or self.second["diverged"])

    @property
    def names(self) -> tuple[str, str]:
        """What details call the two cells: `at 2` and `at 128`, or `of group` and `of batch`."""
        if self.is_along_sizes:
            return f"at {self.first['size']}", f"at {self.second['size']}"
        return f"of {self.first['norm']}", f"of {self.second['norm']}"

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The outcomes of both cells at the seeds that have both."""
        return paired_values(self.first["cell"], self.second["cell"], self.part.outcomes)

    @property
    def improvement(self) -> Interval:
        """Probability that the first cell beats the second under one seed."""
        return paired_improvement(*self.pairs, higher_is_better=self.part.metric.higher_is_better)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for contrasts that differ only in the budget."""
        ends = [(end["recipe"], end["base"], end["size"]) for end in (self.first, self.second)]
        return (self.part.axis, self.part.fixed, self.part.metric.name, *ends)

    @property
    def budget(self) -> str:
        """`epochs=12`; empty if the two cells differ in it, as they may along the batch size."""
        budgets = {end["budget"] for end in (self.first, self.second)}
        return budgets.pop() if len(budgets) == 1 else ""

    def kind(self, family_size: int) -> str:
        """One of DECIDED; `open` (undecided), `interval` (not in the family), `no interval` or
        `no data`."""
        if self.gap.estimate is None:
            return "no data"
        if self.gap.low is None:
            return "no interval"
        if not self.is_primary:
            return "interval"
        verdict = decide(self.gap, margin=self.part.metric.tolerance, family_size=family_size)
        if verdict in self._ruled_out():
            verdict = "open"
        return (ALONG_SIZES if self.is_along_sizes else WITH_REFERENCE).get(verdict, "open")

    def _ruled_out(self) -> set[Verdict]:
        """Verdicts that diverged runs could turn, since they may be worse than they count."""
        above: set[Verdict] = {"above", "within"} if self.first["diverged"] else set()
        below: set[Verdict] = {"below", "within"} if self.second["diverged"] else set()
        return above | below


def contrasts_of(part: Slice) -> Iterator[Contrast]:
    """Each norm along the sizes, then each against the reference at the smallest size, by study."""
    for first, second, is_primary in pairs_of(part):
        a, b = paired_values(first["cell"], second["cell"], part.outcomes)
        gap = paired_difference(a, b, step=part.step, limit=part.metric.limit)
        yield Contrast(
            part, first, second, gap if part.metric.higher_is_better else -gap, is_primary
        )


def pairs_of(part: Slice) -> Iterator[tuple[Row, Row, bool]]:
    """The points of each contrast, and whether it is in the family; needs no values."""
    smallest: dict[str, dict[str, Row]] = {}  # by study and norm
    for norm, rows in part.lines.items():
        if any(row["invalid"] for row in rows):
            continue
        first, last = rows[0], rows[-1]
        if len(rows) > 1 and not first["independent"]:
            yield first, last, first["mixes_samples"]
        if first["size"] == part.sizes[0]:
            smallest.setdefault(first["study"], {})[norm] = first
    for points in smallest.values():
        reference = points[reference_of(list(points))]
        yield from ((point, reference, True) for point in points.values() if point is not reference)


def reference_of(norms: Sequence[str]) -> str:
    """The norm that the others are compared with."""
    return next((norm for norm in norms if base_of(norm) == REFERENCE), norms[0])
