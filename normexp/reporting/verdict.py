"""What a report may claim: the differences that it tests, and the verdict on each.

A report has one primary family (normexp.stats.family). In every slice it holds, for each norm that
mixes samples, the smallest size against the largest, and, for each norm, the comparison with the
reference norm at the smallest size. Each of these that was run at several budgets has one more
member: its change from the shortest to the longest. This rule fixes the family before any result is
known. Only its members get a verdict: loses, gains or holds its level; better, worse or tied;
changes or not. The probability that any verdict is false is at most 5 % for the whole report. All
else is shown with its interval alone.

A verdict is for new seeds and new test samples where the test samples are recorded, else for new
seeds on the same samples. Cells whose recipes differ in anything but the norm, the sizes and the
searched keys are not compared.

The reference is batch norm. In a comparison without batch norm it is the first norm in the order of
figures, whatever the results: layer, instance, group, rms, then others by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normexp.reporting.cells import disagreements
from normexp.reporting.metric import Metric
from normexp.reporting.model import CellRow, Slice, Values
from normexp.reporting.style import base_of
from normexp.stats.contrast import Assessment, Margin, change, difference, verdict_on
from normexp.stats.family import Verdict, p_value
from normexp.stats.interval import Array, Interval, cut, paired_improvement

REFERENCE = "batch"
# The names of verdicts: on a norm along the sizes, on a norm against the reference, on a change.
ALONG_SIZES = {"above": "gains", "below": "loses", "within": "holds"}
WITH_REFERENCE = {"above": "better", "below": "worse", "within": "tie"}
OF_CHANGE = {"above": "changes", "below": "changes", "within": "does not change"}
DECIDED = (*ALONG_SIZES.values(), *WITH_REFERENCE.values())
# Why a difference has no verdict.
NO_VERDICT = {
    "open": "undecided at the error rate of the report",
    "apart": "undecided: it depends on seeds that lie apart",
    "interval": "not one of the differences that the report tests",
    "no interval": "too few seeds in common, or the same difference for every seed",
    "no data": "no seed has a result of both cells",
    "unlike": "the recipes differ in more than the norm, the sizes and the searched keys",
}


@dataclass(frozen=True, eq=False)
class Change:
    """The change of a difference from the shortest budget of a report to the longest.

    budgets: `epochs=12` and `epochs=48`
    assessment: of the second difference minus the first, paired by seed
    margin: as shown, in the unit of the metric
    has_diverged: a run of the four cells diverged, so the change has no verdict
    """

    budgets: tuple[str, str]
    assessment: Assessment
    margin: float
    has_diverged: bool
    family_size: int = 0

    @property
    def gap(self) -> Interval:
        return self.assessment.gap

    @cached_property
    def kind(self) -> str:
        """`changes`, `does not change` (by more than the margin), or why neither is said."""
        if self.gap.estimate is None:
            return "no data"
        if self.gap.low is None:
            return "no interval"
        verdict, is_withheld = verdict_on(self.assessment, self.family_size)
        if is_withheld:
            return "apart"
        return "open" if self.has_diverged else OF_CHANGE.get(verdict, "open")


@dataclass(frozen=True, eq=False)
class Comparison:
    """The difference between two cells of a slice, paired by seed.

    first, second: one norm at its smallest and its largest size, or a norm and the reference norm
        at the smallest size
    sizes: of the first and of the second, along the axis of the slice
    assessment: of first - second, positive if the first is better. A diverged run counts as the
        worst run of the slice, so the gap is a bound: the cell of the diverged run is at most this
        good.
    margin: smaller differences count as none, as shown, in the unit of the metric
    num_samples: test samples; 0: not recorded for every run, so the gap is over seeds alone
    unlike: by key, the values of the recipes for which the cells must not be compared
    is_primary: it belongs to the family
    family_size: the number of differences and changes that the report tests, decided or not
    change: to another budget; None at a single budget
    """

    part: Slice
    first: CellRow
    second: CellRow
    sizes: tuple[int, int]
    assessment: Assessment
    margin: float
    num_samples: int
    unlike: Mapping[str, tuple[Any, Any]]
    is_primary: bool
    family_size: int = 0
    change: Change | None = None

    @property
    def gap(self) -> Interval:
        return cut(self.assessment.gap, self.part.metric.limit)

    @property
    def is_along_sizes(self) -> bool:
        return self.first.norm == self.second.norm

    @property
    def has_diverged(self) -> bool:
        return bool(self.first.diverged or self.second.diverged)

    @property
    def is_judged(self) -> bool:
        """True for the members of the family, whatever their results."""
        return self.is_primary and not self.unlike

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The outcomes of both cells at the seeds that have both."""
        return paired(self.part.outcomes[self.first], self.part.outcomes[self.second])

    @property
    def improvement(self) -> Interval:
        """Probability that the first cell beats the second under the same seed."""
        return paired_improvement(*self.pairs, higher_is_better=self.part.metric.higher_is_better)

    @cached_property
    def kind(self) -> str:
        """The verdict, one of DECIDED, or why there is none, a key of NO_VERDICT."""
        if self.unlike:
            return "unlike"
        if self.gap.estimate is None:
            return "no data"
        if self.gap.low is None:
            return "no interval"
        if not self.is_primary:
            return "interval"
        verdict, is_withheld = verdict_on(self.assessment, self.family_size)
        if is_withheld:
            return "apart"
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
        """p of the gap, times the size of the family; None outside it or without an interval."""
        if not self.is_judged or self.gap.low is None:
            return None
        return min(1.0, self.family_size * p_value(self.gap))

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

    @property
    def length(self) -> float:
        """The number in the budget."""
        return float(self.budget.partition("=")[2] or 0)


def compare(slices: Sequence[Slice]) -> list[Comparison]:
    """Every comparison of the slices of one report, which are one family with their changes."""
    comparisons = [comparison for part in slices for comparison in _comparisons_of(part)]
    changes = _changes(comparisons)
    size = sum(comparison.is_judged for comparison in comparisons) + len(changes)
    changes = {place: replace(one, family_size=size) for place, one in changes.items()}
    return [
        replace(
            comparison,
            family_size=size,
            change=changes.get(comparison.place) if comparison.is_judged else None,
        )
        for comparison in comparisons
    ]


def at_other_budgets(comparison: Comparison, comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparison at the other budgets of the report."""
    place, budget = comparison.place, comparison.budget
    return [other for other in comparisons if other.budget != budget and other.place == place]


def paired(first: Values, second: Values) -> tuple[np.ndarray, np.ndarray]:
    """The values at the seeds that have both, in order of seed."""
    seeds = sorted(first.keys() & second.keys())
    return np.array([first[s] for s in seeds]), np.array([second[s] for s in seeds])


def reference_of(norms: Sequence[str]) -> str:
    """The norm that the others are compared with; norms: in the order of figures."""
    return next((norm for norm in norms if base_of(norm) == REFERENCE), norms[0])


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
    (a, b), num_samples = _outcomes([(part, first), (part, second)])
    margin = margin_of(part.metric)
    assessment = difference(a, b, margin, step=_step(part, num_samples))
    return Comparison(
        part,
        first,
        second,
        sizes,
        assessment,
        margin_at(part.metric, b),
        num_samples,
        disagreements(first, second),
        is_primary,
    )


def _changes(comparisons: Sequence[Comparison]) -> dict[Hashable, Change]:
    """By place, the change of each difference that the report tests at several budgets."""
    by_place: dict[Hashable, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.is_judged and comparison.budget:
            by_place.setdefault(comparison.place, []).append(comparison)
    changes = {}
    for place, same in by_place.items():
        short, long = (pick(same, key=lambda one: one.length) for pick in (min, max))
        if short.length == long.length:
            continue
        cells = [(one.part, cell) for one in (short, long) for cell in (one.first, one.second)]
        (a, b, c, d), num_samples = _outcomes(cells)
        margin = margin_of(short.part.metric)
        steps = [_step(one.part, num_samples) for one in (short, long)]
        changes[place] = Change(
            (short.budget, long.budget),
            change((a, b), (c, d), margin, step=max(steps)),
            margin_at(short.part.metric, d),
            short.has_diverged or long.has_diverged,
        )
    return changes


def margin_of(metric: Metric) -> Margin:
    """Where a difference of the metric is small."""
    perfect = 0.0 if metric.bounds is None else metric.bounds[1]
    return Margin(metric.tolerance, metric.share_of_error, perfect)


def margin_at(metric: Metric, reference: ArrayLike) -> float:
    """The margin at the mean of the reference, in the unit of the metric."""
    margin, values = margin_of(metric), np.asarray(reference)
    if not margin.share or not values.size:
        return margin.cap
    return min(margin.cap, margin.share * (margin.perfect - float(values.mean())))


def _step(part: Slice, num_samples: int) -> float:
    """The smallest difference that values of seeds could have."""
    bounds = part.metric.bounds
    return (bounds[1] - bounds[0]) / num_samples if bounds and num_samples else part.step


def _outcomes(places: Sequence[tuple[Slice, CellRow]]) -> tuple[list[Array], int]:
    """The outcomes of cells at the seeds that all have, higher is better, and the test samples.

    (n,) each, or (n, N) where all N test samples of every run are recorded
    """
    values = [part.outcomes[cell] for part, cell in places]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in values)))
    sign = 1.0 if places[0][0].metric.higher_is_better else -1.0
    samples = [part.samples_of(cell) for part, cell in places]
    tables = [[by_seed.get(seed, np.empty(0)) for seed in seeds] for by_seed in samples]
    counts = {len(row) for table in tables for row in table}
    if len(counts) == 1 and min(counts) > 1:
        return [sign * np.array(table) for table in tables], counts.pop()
    return [sign * np.array([by_seed[seed] for seed in seeds]) for by_seed in values], 0
