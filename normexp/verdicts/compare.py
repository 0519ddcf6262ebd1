"""What a report may claim: differences with their verdicts, and rankings.

The differences of a slice are, for each arm that mixes samples, the smallest size against the
largest, and at every size each arm against the reference. This rule fixes them before any result is
known. A family is one model, data set and budget. The probability that any verdict of a family is
false is at most 5 % (family.py), over new seeds and test samples.

Cells whose recipes differ in anything but the arm, the sizes and the searched keys are not
compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.arms import ORDER
from normexp.verdicts.cells import unlike, value_words
from normexp.verdicts.family import Verdict, decide, difference, least_decided
from normexp.verdicts.interval import Interval
from normexp.verdicts.metric import Estimate, Metric
from normexp.verdicts.slices import Slice
from normexp.words import format_count

REFERENCES = ("batch", "as_built")  # the first that a slice has, unless one is named
DIFFERENCE = "difference [95 %]"
ADDED = "†"  # some of the seeds were added by a later command
NOTHING = Interval(None, None, None, 0)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The difference between two cells of a slice; positive: the first is better.

    sizes: of the first and of the second, along the axis of the slice
    gap: in the unit of the metric; without a value where the two must not be compared
    verdict: None where none is allowed; `why` says why
    num_samples: test samples; 0: not recorded for every run, so the gap is over seeds alone
    is_comparable: both were trained with the same settings, so it belongs to the family
    family_size: the number of differences that share the error rate
    """

    slice: Slice = field(repr=False)
    first: ArmAtSize = field(repr=False)
    second: ArmAtSize = field(repr=False)
    sizes: tuple[int, int]
    gap: Interval
    num_samples: int
    why: str
    is_comparable: bool
    verdict: Verdict | None = None
    family_size: int = 0

    @property
    def is_along_sizes(self) -> bool:
        return self.first.arm == self.second.arm

    @property
    def arm(self) -> str:
        """The first arm, with its size if both arms are the same."""
        return f"{self.first.arm} at {self.sizes[0]}" if self.is_along_sizes else self.first.arm

    @property
    def against(self) -> str:
        return f"{self.second.arm} at {self.sizes[1]}" if self.is_along_sizes else self.second.arm

    @property
    def seeds(self) -> tuple[int, int]:
        """How many seeds the first and the second have."""
        return len(self.first.seeds), len(self.second.seeds)

    @property
    def is_extended(self) -> bool:
        """True if some of its seeds were added after those that the first command declared."""
        return any(cell.is_extended for cell in (*self.first.cells, *self.second.cells))

    @property
    def of_one_search(self) -> str:
        """`at one search's lr`: the verdict holds at the values that it chose; empty without."""
        keys = " and ".join(sorted(self.first.best.searched))
        return f"at one search's {keys}" if keys and self.verdict is not None else ""

    @property
    def mark(self) -> str:
        """The mark of a verdict that rests on added seeds."""
        return ADDED if self.is_extended and self.verdict is not None else ""

    @property
    def row(self) -> dict[str, Any]:
        """The difference as every table prints it."""
        counts = dict.fromkeys(self.seeds) if self.gap.n else {}
        return {
            self.slice.arm_key: self.arm,
            "against": self.against,
            DIFFERENCE: Estimate(self.gap, self.slice.metric.digits, is_signed=True),
            "verdict": (self.verdict or "-") + self.mark,
            "why": self.why,
            "n": " and ".join(map(str, counts)) if len(counts) > 1 else next(iter(counts), None),
        }


def compare(
    slices: Sequence[Slice], reference: str | None = None, least_family: int = 0
) -> list[Comparison]:
    """Every comparison of the slices of one report, with its verdict.

    reference: arm that the others are compared with where it was run; None: batch norm, or as
        `_reference_arm` says
    least_family: verdicts are corrected for so many comparisons, or more
    """
    comparisons, family_sizes = [], Counter[Any]()
    for slice_ in slices:
        of_slice = [*_comparisons_of(slice_, reference)]
        comparisons += of_slice
        family_sizes[slice_.family] += sum(comparison.is_comparable for comparison in of_slice)
        for size in slice_.compared_at if slice_.has_marks else ():
            # The marks of a ranking are tests as well, see Ranking.
            family_sizes[slice_.family] += math.ceil(max(len(slice_.at(size)) - 2, 0) / 2)
    judged = []
    for comparison in comparisons:
        family_size = max(family_sizes[comparison.slice.family], least_family)
        judged.append(judge(comparison, family_size))
    return judged


def judge(comparison: Comparison, family_size: int) -> Comparison:
    """The comparison with its verdict, if one is allowed."""
    comparison = replace(comparison, family_size=family_size)
    metric, gap = comparison.slice.metric, comparison.gap
    if comparison.why:
        return replace(comparison, why="; ".join(filter(None, [comparison.why, gap.why])))
    if gap.low is None:
        why = gap.why or ("one seed" if gap.n == 1 else "same value for every seed")
        return replace(comparison, why=why)
    sides = (comparison.first, comparison.second)
    reasons = [f"{side.arm}: {side.lost}" for side in sides if side.lost]
    if comparison.slice.has_samples and not comparison.num_samples:
        reasons.append("over seeds alone")
    alpha = comparison.slice.alpha
    verdict = decide(gap, margin=metric.tolerance, family_size=family_size, alpha=alpha)
    if verdict == "undecided" and not reasons:
        reasons.append(_why_undecided(gap, metric, family_size, alpha))
    comparison = replace(comparison, verdict=verdict)
    reasons.append(comparison.of_one_search)
    return replace(comparison, why="; ".join(dict.fromkeys(filter(None, reasons))))


def _why_undecided(gap: Interval, metric: Metric, family_size: int, alpha: float) -> str:
    """`excludes 0, but not after correction for 4 comparisons`, or what would have been decided."""
    assert gap.low is not None and gap.high is not None
    if not gap.low <= 0 <= gap.high:
        count = format_count(family_size, "comparison")
        return f"excludes 0, but not after correction for {count}"
    least = least_decided(gap, family_size=family_size, alpha=alpha)
    size = f"{least:.{metric.digits}f} {metric.unit}".strip()
    alone = gap.further[0][1] if gap.further else gap.error  # the error over seeds alone
    what = "test samples" if gap.error and alone and gap.error > 2 * alone else "seeds"
    return f"{what} differ too much: {size} would be decided"


def _reference_arm(slice_: Slice, name: str | None) -> str:
    """The arm that the others are compared with.

    It is the one that is named, at whatever size it was run. Else it is one of those at the first
    size of a comparison: of norms the first of REFERENCES and ORDER; else the one as shipped, or
    the first that was asked for. The same rule picks among several arms of one name.
    """
    everywhere = [line[min(line)] for line in slice_.lines.values()]
    sides = [side for side in everywhere if name in (side.arm, side.best.arm_name)]
    if not sides:
        sides = [*slice_.at(slice_.compared_at[0]).values()]
        for wanted in (*REFERENCES, *ORDER) if slice_.is_main else ():
            named = [side for side in sides if wanted in (side.arm, side.best.arm_name)]
            if named:
                sides = named
                break
    return min(sides, key=lambda side: (side.best.num_knobs, side.best.asked_at)).arm


def _comparisons_of(slice_: Slice, reference_name: str | None) -> Iterator[Comparison]:
    """The comparisons of a slice: along the sizes, then with the reference at each size."""
    for arm, line in slice_.lines.items():
        smallest, largest = min(line), max(line)
        if slice_.is_main and len(line) > 1 and arm not in slice_.independent:
            yield compare_pair(slice_, line[smallest], line[largest], (smallest, largest))
    reference = slice_.lines[_reference_arm(slice_, reference_name)]
    others = [line for line in slice_.lines.values() if line is not reference]
    met = set()
    for size in slice_.compared_at:
        for line in others:
            pair = line.get(size), reference.get(size)
            # Two arms that mix no samples are the same at every size.
            if pair[0] and pair[1] and pair not in met:
                met.add(pair)
                yield compare_pair(slice_, pair[0], pair[1], (size, size))
    compared = {first.arm for first, _ in met}
    size = next(filter(reference.__contains__, slice_.compared_at), slice_.compared_at[0])
    for line in others:
        first, second = (one.get(size, one[min(one)]) for one in (line, reference))
        if first.arm not in compared:
            yield compare_pair(slice_, first, second, (size, size))


def compare_pair(
    slice_: Slice, first: ArmAtSize, second: ArmAtSize, sizes: tuple[int, int]
) -> Comparison:
    """The comparison of two arms or sizes, not yet judged."""
    why = _why_not_compared(slice_, first, second, sizes)
    is_comparable, gap, num_samples = not why, NOTHING, 0
    if is_comparable and first.seeds and second.seeds:
        drift = None if first.waves is None else slice_.drift_between(first, second)
        gap, num_samples = gap_of(first, second, drift)
    why = (
        why
        or first.why_incomplete
        or second.why_incomplete
        or _why_not_searched(first, second)
        or first.why_at_edge
        or second.why_at_edge
        or slice_.no_verdict
    )
    return Comparison(slice_, first, second, sizes, gap, num_samples, why, is_comparable)


def _why_not_compared(
    slice_: Slice, first: ArmAtSize, second: ArmAtSize, sizes: tuple[int, int]
) -> str:
    """`not compared: lr 0.1 and 0.3`; empty if both were trained with the same settings."""
    if slice_.lines[first.arm].get(sizes[0]) is not first:
        return f"not run{slice_.at_words(sizes[0])}"
    if slice_.lines[second.arm].get(sizes[1]) is not second:
        return f"{second.arm} was not run{slice_.at_words(sizes[1])}"
    is_tuned, tuned = len(first.cells) > 1 or len(second.cells) > 1, first.best.roles.tuned
    words = []
    if first.best.runs and second.best.runs:  # the settings of planned cells are not known
        searched = [tuned] if is_tuned and tuned else []
        different = unlike(first.best, second.best, searched=searched)
        for key, (a, b) in different.items():
            words.append(f"{key} {value_words(a)} and {value_words(b)}")
    if is_tuned and first.tried != second.tried:
        words.append(f"{tuned} not searched alike")
    if words:
        more = f" and {len(words) - 2} more" if len(words) > 2 else ""
        return f"not compared: {', '.join(words[:2])}{more}"
    return "INVALID" if any(cell.invalid for cell in (*first.cells, *second.cells)) else ""


def _why_not_searched(first: ArmAtSize, second: ArmAtSize) -> str:
    """Empty if no search chose their values, or if both searches had the same points.

    A searched seed may not count again: the search chose the values at which it was lucky.
    """
    search = first.best.search
    if search != second.best.search:
        keys = first.best.searched | second.best.searched
        return f"{' and '.join(sorted(keys))} not searched alike"
    if search is None:
        return ""
    if not search.points:
        return f"study {first.best.study}-search is missing"
    again = {*first.seeds, *second.seeds}.intersection(*(seeds for _, seeds in search.points))
    return f"seed {min(again)} was searched, too" if again else ""


def gap_of(first: ArmAtSize, second: ArmAtSize, drift: float | None) -> tuple[Interval, int]:
    """The difference of two arms that both have seeds, and the number of its test samples.

    Over seeds alone (0) unless both have the outcomes of the same test samples. Seeds are paired
    where both are of the same runs, evaluated in two ways.

    drift: of their table, along the test text; None if they were not tested on a text
    """
    metric, step = second.metric, first.best.step(second.metric)
    a, b = first.outcomes, second.outcomes
    num_samples = a.shape[1] if a.shape[1:] == b.shape[1:] and a.ndim == 2 else 0
    if num_samples:
        step = metric.limit / num_samples if metric.bounds else step
    else:
        a, b = (one if one.ndim == 1 else one.mean(axis=1) for one in (a, b))
    folders = [[cell.directory for cell in side.cells] for side in (first, second)]
    outcomes = [a - b] if folders[0] == folders[1] and a.shape == b.shape else [a, b]
    gap = difference(*outcomes, step=step, limit=metric.limit, drift=drift)
    return gap, num_samples


# Rankings


@dataclass(frozen=True, eq=False)
class Place:
    """An arm in a ranking.

    side: None if it was not run at that size
    comparison: with the reference; None for the reference itself
    may_be_best: None if it is not ranked
    """

    arm: str
    side: ArmAtSize | None
    comparison: Comparison | None
    may_be_best: bool | None = None


@dataclass(frozen=True)
class Ranking:
    """Arms at one size by their estimate, the best first; others stand last.

    An arm may be the best unless another is shown to be better, or all of its seeds are at chance.
    The true best of k arms is left out by mistake if any of its k - 1 one-sided tests errs. That
    against the reference is a member of the family already, and of the other k - 2 two count as
    one. Together with the verdicts against the reference, the error rate is at most 5 %.
    """

    slice: Slice
    size: int
    reference: str
    places: Sequence[Place]
    family_size: int

    @property
    def best(self) -> list[str]:
        """The arms that may be the best."""
        return [place.arm for place in self.places if place.may_be_best]


def rank(slice_: Slice, comparisons: Sequence[Comparison]) -> list[Ranking]:
    """The arms of a slice at each size where several are compared, the first size first."""
    between = [c for c in comparisons if c.slice is slice_ and not c.is_along_sizes]
    rankings = []
    for size in slice_.compared_at:
        at_size = slice_.at(size)
        of_size = {}
        for comparison in between:
            sides = (comparison.first, comparison.second)
            is_run = all(at_size.get(side.arm) is side for side in sides)
            if is_run or comparison.sizes[0] == size:
                of_size[comparison.first.arm] = comparison
        if of_size:
            rankings.append(_rank_at(slice_, size, of_size))
    return rankings


def _rank_at(slice_: Slice, size: int, with_reference: Mapping[str, Comparison]) -> Ranking:
    """The ranking at one size. with_reference: by arm, its comparison"""
    any_comparison = next(iter(with_reference.values()))
    compared = slice_.at(size)
    levels = dict.fromkeys((*compared, *with_reference), -math.inf)
    for arm, side in compared.items():
        if side.mean.estimate is not None:
            levels[arm] = slice_.metric.sign * side.mean.estimate
    ranked = [
        arm
        for arm in compared
        if arm not in with_reference or with_reference[arm].verdict is not None
    ]
    may_be_best: dict[str, bool] = {}
    for arm in ranked if len(ranked) > 1 and slice_.has_marks else ():
        may_be_best[arm] = not compared[arm].is_at_chance
        for rival in ranked:
            if levels[rival] > levels[arm]:
                pair = compare_pair(slice_, compared[rival], compared[arm], (size, size))
                if judge(pair, any_comparison.family_size).verdict == "better":
                    may_be_best[arm] = False
                    break
    places = [
        Place(arm, compared.get(arm), with_reference.get(arm), may_be_best.get(arm))
        for arm in sorted(levels, key=lambda arm: (arm not in ranked, -levels[arm]))
    ]
    return Ranking(slice_, size, any_comparison.second.arm, places, any_comparison.family_size)
