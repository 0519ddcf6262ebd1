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

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from normexp.reporting.model import CellRow, Slice, Values
from normexp.reporting.style import base_of
from normexp.stats.family import Verdict, decide, p_value
from normexp.stats.interval import Interval, crossed_mean, paired_difference, paired_improvement

REFERENCE = "batch"
# The names of verdicts: on a norm along the sizes, and on a norm against the reference.
ALONG_SIZES = {"above": "gains", "below": "loses", "within": "holds"}
WITH_REFERENCE = {"above": "better", "below": "worse", "within": "tie"}
DECIDED = (*ALONG_SIZES.values(), *WITH_REFERENCE.values())
# Why a difference has no verdict.
NO_VERDICT = {
    "open": "undecided at the error rate of the report",
    "interval": "not one of the differences that the report tests",
    "no interval": "too few seeds in common, or the same difference for every seed",
    "no data": "no seed has a result of both cells",
}


@dataclass(frozen=True, eq=False)
class Comparison:
    """The difference between two cells of a slice, paired by seed.

    first, second: one norm at its smallest and its largest size, or a norm and the reference norm
        at the smallest size
    sizes: of the first and of the second, along the axis of the slice
    gap: first - second over new seeds, positive if the first is better. A diverged run counts as
        the worst run of the slice, so the gap is a bound: the cell of the diverged run is at most
        this good.
    is_primary: it belongs to the family whenever the seeds allow an interval
    family_size: the number of differences that the report tests, with or without a decision
    """

    part: Slice
    first: CellRow
    second: CellRow
    sizes: tuple[int, int]
    gap: Interval
    is_primary: bool
    family_size: int = 0

    @property
    def is_along_sizes(self) -> bool:
        return self.first.norm == self.second.norm

    @property
    def has_diverged(self) -> bool:
        return bool(self.first.diverged or self.second.diverged)

    @property
    def is_judged(self) -> bool:
        """True for the members of the family."""
        return self.is_primary and self.gap.low is not None

    @property
    def margin(self) -> float:
        """Smaller differences are ties, in the unit of the metric."""
        return self.part.metric.tolerance

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The outcomes of both cells at the seeds that have both."""
        return paired(self.part.outcomes[self.first], self.part.outcomes[self.second])

    @property
    def improvement(self) -> Interval:
        """Probability that the first cell beats the second under the same seed."""
        return paired_improvement(*self.pairs, higher_is_better=self.part.metric.higher_is_better)

    @cached_property
    def over_samples(self) -> Interval | None:
        """The gap over new test samples as well as new seeds.

        None unless every run recorded its samples; a diverged run has none.
        """
        metric, cells = self.part.metric, (self.first, self.second)
        seeds = set(self.part.values[self.first]) & set(self.part.values[self.second])
        if self.has_diverged or len(seeds) < 2:
            return None
        tables = [[run.samples(metric) for run in cell.runs if run.seed in seeds] for cell in cells]
        counts = {len(samples) for table in tables for samples in table}
        if len(counts) > 1 or 0 in counts:
            return None
        differences = np.array(tables[0]) - np.array(tables[1])
        gap = crossed_mean(differences, step=self.part.step, limit=metric.limit)
        return gap if metric.higher_is_better else -gap

    @cached_property
    def kind(self) -> str:
        """The verdict, one of DECIDED, or why there is none, a key of NO_VERDICT."""
        if self.gap.estimate is None:
            return "no data"
        if self.gap.low is None:
            return "no interval"
        if not self.is_primary:
            return "interval"
        verdict = decide(self.gap, margin=self.margin, family_size=self.family_size)
        names = ALONG_SIZES if self.is_along_sizes else WITH_REFERENCE
        return "open" if verdict in self._ruled_out else names.get(verdict, "open")

    @property
    def verdict(self) -> str | None:
        return self.kind if self.kind in DECIDED else None

    @property
    def why_no_verdict(self) -> str | None:
        return NO_VERDICT.get(self.kind)

    @property
    def p(self) -> float | None:
        """p of the gap, times the size of the family; None outside it."""
        return min(1.0, self.family_size * p_value(self.gap)) if self.is_judged else None

    @property
    def _ruled_out(self) -> set[Verdict]:
        """Verdicts that could be wrong, because a diverged run may be worse than it counts."""
        above: set[Verdict] = {"above", "within"} if self.first.diverged else set()
        below: set[Verdict] = {"below", "within"} if self.second.diverged else set()
        return above | below

    @property
    def ends(self) -> Hashable:
        """Equal for comparisons that differ only in their slice."""
        return self.first.norm, self.second.norm, self.sizes

    @cached_property
    def place(self) -> Hashable:
        """Equal for comparisons that differ only in the budget."""
        cells = (self.first, self.second)
        ends = tuple((cell.place, cell.base) for cell in cells)
        return (self.part.axis, self.part.fixed, self.part.metric.name, ends, self.sizes)

    @property
    def budget(self) -> str:
        """`epochs=12`; empty if the two cells have different budgets, as along the batch size."""
        return self.first.budget if self.first.budget == self.second.budget else ""


def compare(slices: Sequence[Slice]) -> list[Comparison]:
    """Every comparison of the slices of one report, which are one family."""
    comparisons = [comparison for part in slices for comparison in _comparisons_of(part)]
    size = sum(comparison.is_judged for comparison in comparisons)
    return [replace(comparison, family_size=size) for comparison in comparisons]


def at_other_budgets(comparison: Comparison, comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparison at the other budgets of the report."""
    place, budget = comparison.place, comparison.budget
    return [other for other in comparisons if other.budget != budget and other.place == place]


def survives(comparison: Comparison, comparisons: Sequence[Comparison]) -> bool:
    """True if the verdict is the same at every budget, and there are several."""
    return {other.kind for other in at_other_budgets(comparison, comparisons)} == {comparison.kind}


def paired(first: Values, second: Values) -> tuple[np.ndarray, np.ndarray]:
    """The values at the seeds that have both, in order of seed."""
    seeds = sorted(first.keys() & second.keys())
    return np.array([first[s] for s in seeds]), np.array([second[s] for s in seeds])


def _comparisons_of(part: Slice) -> Iterator[Comparison]:
    """Comparisons of a slice: along the sizes, then with the reference of the same study."""
    smallest: dict[str, dict[str, CellRow]] = {}  # by study and norm
    for norm, line in part.lines.items():
        if any(cell.invalid for cell in line.values()):
            continue
        size, largest = min(line), max(line)
        first, last = line[size], line[largest]
        if len(line) > 1 and norm not in part.independent:
            mixes_samples = first.mixes_samples or last.mixes_samples
            yield _comparison(part, first, last, (size, largest), is_primary=mixes_samples)
        if size == part.sizes[0]:
            smallest.setdefault(first.study, {})[norm] = first
    for cells in smallest.values():
        reference = cells[reference_of(list(cells))]
        for cell in cells.values():
            if cell is not reference:
                sizes = (part.sizes[0], part.sizes[0])
                yield _comparison(part, cell, reference, sizes, is_primary=True)


def _comparison(
    part: Slice, first: CellRow, second: CellRow, sizes: tuple[int, int], *, is_primary: bool
) -> Comparison:
    pairs = paired(part.outcomes[first], part.outcomes[second])
    gap = paired_difference(*pairs, step=part.step, limit=part.metric.limit)
    gap = gap if part.metric.higher_is_better else -gap
    return Comparison(part, first, second, sizes, gap, is_primary)


def reference_of(norms: Sequence[str]) -> str:
    """The norm that the others are compared with; norms: in the order of figures."""
    return next((norm for norm in norms if base_of(norm) == REFERENCE), norms[0])
