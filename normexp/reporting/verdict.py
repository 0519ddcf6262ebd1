"""What a report may claim: the differences that it tests, and the verdict on each.

A report has one primary family (normexp.stats.family). In every slice it holds, for each norm that
mixes samples, the smallest size against the largest, and, for each norm, the comparison with the
reference norm at the smallest size. This rule fixes the family before any result is known. Only its
members get a verdict: loses, gains or holds its level; better, worse or tied. The probability that
any verdict is false is at most 5 % for the whole report. All else is shown with its interval alone.

The reference is batch norm. In a comparison without batch norm it is the first norm in the order of
figures, whatever the results: layer, instance, group, rms, then others by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from normexp.reporting.frame import Row, paired_values
from normexp.reporting.slices import Slice
from normexp.reporting.style import base_of
from normexp.stats.family import Verdict, decide, distances_to, p_value
from normexp.stats.interval import Interval, paired_difference, paired_improvement

REFERENCE = "batch"
# The names of verdicts: on a norm along the sizes, and on a norm against the reference.
ALONG_SIZES = {"above": "gains", "below": "loses", "within": "holds"}
WITH_REFERENCE = {"above": "better", "below": "worse", "within": "tie"}
DECIDED = (*ALONG_SIZES.values(), *WITH_REFERENCE.values())


@dataclass(frozen=True)
class Contrast:
    """The difference between two cells of a slice, paired by seed.

    first, second: the points of the cells: one norm at its smallest and its largest size, or a norm
        and the reference norm at the smallest size
    is_primary: true if it belongs to the family whenever the seeds allow an interval
    """

    part: Slice
    first: Row
    second: Row
    is_primary: bool

    @property
    def is_along_sizes(self) -> bool:
        return self.first["norm"] == self.second["norm"]

    @property
    def has_diverged(self) -> bool:
        return bool(self.first["diverged"] or self.second["diverged"])

    @cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The outcomes of both cells at the seeds that have both."""
        return paired_values(self.first["cell"], self.second["cell"], self.part.outcomes)

    @cached_property
    def gap(self) -> Interval:
        """first - second, positive if the first is better.

        A diverged run counts as the worst run of the slice, so the gap is a bound: the cell of the
        diverged run is at most this good.
        """
        metric = self.part.metric
        gap = paired_difference(*self.pairs, step=self.part.step, limit=metric.limit)
        return gap if metric.higher_is_better else -gap

    @property
    def improvement(self) -> Interval:
        """Probability that the first cell beats the second under the same seed."""
        return paired_improvement(*self.pairs, higher_is_better=self.part.metric.higher_is_better)

    @property
    def is_judged(self) -> bool:
        return self.is_primary and self.gap.low is not None

    @property
    def ends(self) -> tuple[object, ...]:
        """Equal for contrasts that differ only in their slice."""
        return tuple((end["norm"], end["size"]) for end in (self.first, self.second))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for contrasts that differ only in the budget."""
        ends = [(end["recipe"], end["base"], end["size"]) for end in (self.first, self.second)]
        return (self.part.axis, self.part.fixed, self.part.metric.name, *ends)

    @property
    def budget(self) -> str:
        """`epochs=12`; empty if the two cells have different budgets, as along the batch size."""
        budgets = {end["budget"] for end in (self.first, self.second)}
        return budgets.pop() if len(budgets) == 1 else ""


@dataclass(frozen=True)
class Family:
    """The verdicts of a report on the contrasts of all its slices."""

    contrasts: Sequence[Contrast]

    @cached_property
    def size(self) -> int:
        """The number of differences that are tested, with or without a decision."""
        return sum(one.is_judged for one in self.contrasts)

    def kind(self, one: Contrast) -> str:
        """One of DECIDED; `open` (undecided), `interval` (not in the family), `no interval` or
        `no data`."""
        if one.gap.estimate is None:
            return "no data"
        if one.gap.low is None:
            return "no interval"
        if not one.is_primary:
            return "interval"
        distances = distances_to(one.part.metric.tolerance, one.gap)
        verdict = decide(one.gap, distances=distances, family_size=self.size)
        names = ALONG_SIZES if one.is_along_sizes else WITH_REFERENCE
        return "open" if verdict in _ruled_out(one) else names.get(verdict, "open")

    def p(self, one: Contrast) -> float | None:
        """p of the gap, times the size of the family; None outside it."""
        return min(1.0, self.size * p_value(one.gap)) if one.is_judged else None

    def at_other_budgets(self, one: Contrast) -> list[Contrast]:
        return [c for c in self.contrasts if c.key == one.key and c.budget != one.budget]

    def survives(self, one: Contrast) -> bool:
        """True if the contrast has the same verdict at every budget, and was tried at several."""
        kinds = {self.kind(other) for other in self.at_other_budgets(one)}
        return kinds == {self.kind(one)}


def _ruled_out(one: Contrast) -> set[Verdict]:
    """Verdicts that could be wrong, because a diverged run may be worse than it counts."""
    above: set[Verdict] = {"above", "within"} if one.first["diverged"] else set()
    below: set[Verdict] = {"below", "within"} if one.second["diverged"] else set()
    return above | below


def contrasts_of(part: Slice) -> Iterator[Contrast]:
    """Contrasts of a slice: along the sizes, then with the reference of the same study."""
    smallest: dict[str, dict[str, Row]] = {}  # by study and norm
    for norm, rows in part.lines.items():
        if any(row["invalid"] for row in rows):
            continue
        first, last = rows[0], rows[-1]
        if len(rows) > 1 and not first["independent"]:
            mixes_samples = first["mixes_samples"] or last["mixes_samples"]
            yield Contrast(part, first, last, is_primary=mixes_samples)
        if first["size"] == part.sizes[0]:
            smallest.setdefault(first["study"], {})[norm] = first
    for points in smallest.values():
        reference = points[reference_of(list(points))]
        for point in points.values():
            if point is not reference:
                yield Contrast(part, point, reference, is_primary=True)


def reference_of(norms: Sequence[str]) -> str:
    """The norm that the others are compared with; norms: in the order of figures."""
    return next((norm for norm in norms if base_of(norm) == REFERENCE), norms[0])
