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

The reference is batch norm, unless the report is given another. In a comparison without it, it is
the first norm in the order of figures, whatever the results: layer, instance, group, rms, then
others by name.

The family also holds the tests by which normexp.reporting.ranking finds the norms that may be best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from normexp.reporting.cells import disagreements
from normexp.reporting.metric import Metric
from normexp.reporting.model import CellRow, Slice, Values
from normexp.reporting.style import base_of
from normexp.stats.contrast import Assessment, Margin, change, difference, verdict_on
from normexp.stats.crossfit import CrossFit, cross_fit
from normexp.stats.family import Verdict, p_value, seeds_to_decide
from normexp.stats.interval import Array, Interval, cut, paired_improvement

REFERENCES = ("batch", "as_built")  # unless one is named: the first that a slice has
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
    "search": "learning rates were searched, and not every rate has the same three or more seeds",
    "given rates": "one search chose the learning rates, so this holds given the chosen rates",
    "undeclared": "the number of seeds was not declared: no study.jsonl names the cells",
    "incomplete": "not all declared seeds have ended",
    "unended": "not all declared cells have ended",
    "doubtful": "records of the cells contradict themselves",
    "extended": "seeds were added to the declared ones",
    "unlike": "the recipes differ in more than the norm, the sizes and the searched keys",
}


@dataclass(frozen=True, eq=False)
class Change:
    """The change of a difference from the shortest budget of a report to the longest.

    ends: the difference at either budget
    assessment: of the second difference minus the first, paired by seed
    margin: as shown, in the unit of the metric
    """

    ends: tuple[Comparison, Comparison]
    assessment: Assessment
    margin: float
    family_size: int = 0
    is_judged: ClassVar[bool] = True

    @property
    def budgets(self) -> list[str]:
        return [end.budget for end in self.ends]

    @property
    def round(self) -> int:
        return max(end.round for end in self.ends)

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
        if why := next(filter(None, (end.why_not_judged for end in self.ends)), None):
            return why
        verdict, is_withheld = verdict_on(self.assessment, self.family_size)
        if is_withheld:
            return "apart"
        has_diverged = any(end.has_diverged for end in self.ends)
        return "open" if has_diverged else OF_CHANGE.get(verdict, "open")


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
    tuned: of the first and the second, the cross-fitted grid of learning rates; None: one rate
    diverged: whether a run of the first, and of the second, diverged
    num_samples: test samples; 0: not recorded for every run, so the gap is over seeds alone
    unlike: by key, the values of the recipes for which the cells must not be compared
    is_primary: it belongs to the family
    is_reference_given: the report was given the norm of the second cell as the reference, and would
        have chosen another
    family_size: the number of differences and changes that the report tests, decided or not
    change: to another budget; None at a single budget
    """

    part: Slice
    first: CellRow
    second: CellRow
    sizes: tuple[int, int]
    assessment: Assessment
    margin: float
    tuned: Sequence[CrossFit | None]
    diverged: Sequence[bool]
    num_samples: int
    unlike: Mapping[str, tuple[Any, Any]]
    is_primary: bool
    family_size: int = 0
    change: Change | None = None
    is_reference_given: bool = False

    @property
    def gap(self) -> Interval:
        return cut(self.assessment.gap, self.part.metric.limit)

    @property
    def is_along_sizes(self) -> bool:
        return self.first.norm == self.second.norm

    @property
    def has_diverged(self) -> bool:
        return any(self.diverged)

    @property
    def round(self) -> int:
        """The command of the study that declared it; each has a family of its own."""
        return max(cell.round for cell in self.cells)

    @property
    def cells(self) -> list[CellRow]:
        """Every cell that the difference rests on."""
        return [cell for end in (self.first, self.second) for cell in self.part.grid(end)]

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
        """Probability that the first cell beats the second under the same seed; none if tuned."""
        if any(self.tuned):  # their values are those of all seeds together
            return paired_improvement([], [], higher_is_better=True)
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
        return self.decision if self.is_primary else "interval"

    @cached_property
    def decision(self) -> str:
        """What the family decides on a difference with an interval, or why it does not."""
        if why := self.why_not_judged:
            return why
        verdict, is_withheld = verdict_on(self.assessment, self.family_size)
        if is_withheld:
            return "apart"
        names = ALONG_SIZES if self.is_along_sizes else WITH_REFERENCE
        return "open" if verdict in self._ruled_out else names.get(verdict, "open")

    @property
    def why_not_judged(self) -> str | None:
        """The key of NO_VERDICT if design or records allow no verdict, whatever the results."""
        is_grid = [bool(self.part.alternatives(cell)) for cell in (self.first, self.second)]
        if any(is_grid) and None in self.tuned:
            return "given rates" if self.first.searched else "search"
        if not any(is_grid) and self.first.searched:
            return "given rates"
        states = {cell.state_of_seeds for cell in self.cells}
        wanting = ("undeclared", "incomplete", "extended")
        if state := next((state for state in wanting if state in states), None):
            return state
        # With every further cell the family grows, so a verdict would come and go.
        return "unended" if any(cell.unended for cell in self.cells) else None

    @property
    def seeds_to_decide(self) -> int | None:
        """See normexp.stats.family.seeds_to_decide; None outside the family."""
        if not self.is_judged:
            return None
        return seeds_to_decide(self.assessment.gap, self.margin, self.family_size)

    @property
    def lacks_samples(self) -> bool:
        """True if more test samples would save more than half of the seeds that would decide."""
        asked = (self.assessment.gap, self.margin, self.family_size)
        least = seeds_to_decide(*asked, any_samples=True) if self.is_judged else None
        return least is not None and 2 * least < (seeds_to_decide(*asked) or math.inf)

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
        above: set[Verdict] = {"above", "within"} if self.diverged[0] else set()
        below: set[Verdict] = {"below", "within"} if self.diverged[1] else set()
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


def compare(slices: Sequence[Slice], reference: str | None = None) -> list[Comparison]:
    """Every comparison of the slices of one report.

    With their changes and the choice of the best norms they are one family, and one more for each
    later command that added cells.

    reference: norm that the others are compared with where it was run; None: batch norm
    """
    comparisons = [comparison for part in slices for comparison in _comparisons_of(part, reference)]
    changes = _changes(comparisons)
    members = [*comparisons, *changes.values()]
    sizes = Counter(member.round for member in members if member.is_judged)
    for part in slices:
        sizes += _tests_of_best(part, reference)
    changes = {
        place: replace(change, family_size=sizes[change.round]) for place, change in changes.items()
    }
    return [
        replace(
            comparison,
            family_size=sizes[comparison.round],
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


def reference_of(norms: Sequence[str], wanted: str | None = None) -> str:
    """The norm that the others are compared with; norms: in the order of figures."""
    names = (wanted or REFERENCES[0], *REFERENCES)
    known = [norm for name in names for norm in norms if name in (norm, base_of(norm))]
    return known[0] if known else norms[0]


def contenders(part: Slice) -> list[dict[str, CellRow]]:
    """For each study, the cells at the smallest size that are compared with each other, by norm."""
    by_study: dict[str, dict[str, CellRow]] = {}
    for norm, cell in part.smallest.items():
        if not any(other.invalid for other in part.lines[norm].values()):
            by_study.setdefault(cell.study, {})[norm] = cell
    return list(by_study.values())


def round_of(part: Slice, cell: CellRow) -> int:
    """The command that declared a cell, or the last of the grid in which it was chosen."""
    return max(other.round for other in part.grid(cell))


def _tests_of_best(part: Slice, wanted: str | None) -> Counter[int]:
    """By round, the members that the choice of the best norms adds; see reporting/ranking.py.

    It compares the k norms that one command declared. The best is left out by mistake if any other
    is found to be better: k - 1 tests. The one against the reference is in the family already. The
    rest are one-sided, so two of them count as one member.
    """
    added: Counter[int] = Counter()
    for cells in contenders(part):
        reference = reference_of(list(cells), wanted)
        rounds = Counter(round_of(part, cell) for cell in cells.values())
        for number, num_norms in rounds.items():
            has_reference = number == round_of(part, cells[reference])
            added[number] += math.ceil((num_norms - 1 - has_reference) / 2)
    return added


def _comparisons_of(part: Slice, wanted: str | None) -> Iterator[Comparison]:
    """Comparisons of a slice: along the sizes, then with the reference of the same study."""
    for norm, line in part.lines.items():
        if any(cell.invalid for cell in line.values()):
            continue
        size, largest = min(line), max(line)
        first, last = line[size], line[largest]
        if len(line) > 1 and norm not in part.independent:
            mixes_samples = first.mixes_samples or last.mixes_samples
            yield compare_cells(part, first, last, (size, largest), is_primary=mixes_samples)
    for cells in contenders(part):
        reference = cells[reference_of(list(cells), wanted)]
        is_given = reference.norm != reference_of(list(cells))
        for cell in cells.values():
            if cell is not reference:
                sizes = (part.sizes[0], part.sizes[0])
                comparison = compare_cells(part, cell, reference, sizes, is_primary=True)
                yield replace(comparison, is_reference_given=is_given)


def compare_cells(
    part: Slice, first: CellRow, second: CellRow, sizes: tuple[int, int], *, is_primary: bool
) -> Comparison:
    outcomes = outcomes_of([(part, first), (part, second)])
    (a, b), num_samples = outcomes.tables, outcomes.num_samples
    margin = margin_of(part.metric)
    assessment = difference(a, b, margin, step=_step(part, num_samples))
    rates = [[other.lr for other in part.alternatives(cell)] for cell in (first, second)]
    unlike = disagreements(first, second, are_rates_searched=rates[0] == rates[1] != [])
    if rates[0] != rates[1]:
        unlike["searched lr"] = (_rates_words(rates[0]), _rates_words(rates[1]))
    return Comparison(
        part,
        first,
        second,
        sizes,
        assessment,
        margin_at(part.metric, b),
        outcomes.tuned,
        outcomes.diverged,
        num_samples,
        unlike,
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
        short, long = (pick(same, key=lambda comparison: comparison.length) for pick in (min, max))
        if short.length == long.length:
            continue
        cells = [
            (comparison.part, cell)
            for comparison in (short, long)
            for cell in (comparison.first, comparison.second)
        ]
        outcomes = outcomes_of(cells)
        (a, b, c, d), num_samples = outcomes.tables, outcomes.num_samples
        margin = margin_of(short.part.metric)
        steps = [_step(comparison.part, num_samples) for comparison in (short, long)]
        changes[place] = Change(
            (short, long),
            change((a, b), (c, d), margin, step=max(steps)),
            margin_at(short.part.metric, d),
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


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of several cells at the seeds that all have; higher is better.

    seeds: n, those that every cell has
    tables: (n,) for each cell, or (n, N) where all N test samples of every run are recorded; of a
        cell whose learning rate was chosen from a complete grid, the cross-fitted values
    tuned: the grid of each cell; None for a single rate, or if a grid is incomplete
    diverged: whether a run of each cell, or of a rate that was chosen, diverged
    """

    seeds: Sequence[int]
    tables: Sequence[Array]
    num_samples: int
    tuned: Sequence[CrossFit | None]
    diverged: Sequence[bool]


def outcomes_of(places: Sequence[tuple[Slice, CellRow]]) -> Outcomes:
    grids = [(part, part.grid(cell)) for part, cell in places]
    if not _are_complete(places):
        grids = [(part, [cell]) for part, cell in places]
    values = [[part.with_diverged(cell) for cell in grid] for part, grid in grids]
    seeds = sorted(set.intersection(*(set(by_seed) for grid in values for by_seed in grid)))
    samples = [[part.samples_of(cell) for cell in grid] for part, grid in grids]
    counts = {len(by_seed.get(seed, ())) for grid in samples for by_seed in grid for seed in seeds}
    num_samples = counts.pop() if len(counts) == 1 else 0
    chosen = samples if num_samples > 1 else values
    sign = 1.0 if places[0][0].metric.higher_is_better else -1.0
    tables = [
        sign * np.array([[by_seed[seed] for seed in seeds] for by_seed in grid], dtype=np.float64)
        for grid in chosen
    ]
    fits = [
        cross_fit(part.scores(cell, seeds), table) if len(table) > 1 else None
        for (part, cell), table in zip(places, tables, strict=True)
    ]
    return Outcomes(
        seeds,
        [table[0] if fit is None else fit.values for fit, table in zip(fits, tables, strict=True)],
        num_samples if num_samples > 1 else 0,
        fits,
        [
            any(
                cell.diverged and (fit is None or fit.shares[place] > 0)
                for place, cell in enumerate(grid)
            )
            for (_, grid), fit in zip(grids, fits, strict=True)
        ],
    )


def _are_complete(places: Sequence[tuple[Slice, CellRow]]) -> bool:
    """True if a complete grid tunes every cell, all with the same seeds."""
    seeds = [part.with_diverged(cell).keys() for part, cell in places]
    return all(same == seeds[0] for same in seeds) and all(
        len(part.grid(cell)) > 1 and part.is_complete(cell) for part, cell in places
    )


def _rates_words(rates: Sequence[float | None]) -> str:
    """`5 rates from 0.03 to 3`, or `none`."""
    known = [rate for rate in rates if rate is not None]
    return f"{len(rates)} rates from {known[0]:g} to {known[-1]:g}" if known else "none"
