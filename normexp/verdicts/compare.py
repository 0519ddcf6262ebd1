"""What a report may claim: differences with their verdicts, rankings, and the causes of a drop.

The differences of a slice are, for each norm that mixes samples, the smallest size against the
largest, and each norm against the reference norm at the smallest size. This rule fixes them before
any result is known. A family is a table: one model, data set and budget. The probability that any
verdict of a family is false is at most 5 % (family.py), over new seeds and test samples.

Cells whose recipes differ in anything but the norm, the sizes and the searched keys are not
compared. The reference is batch norm, unless the report is given another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from normexp.verdicts.cells import unlike, value_words
from normexp.verdicts.family import Verdict, decide, difference, least_decided
from normexp.verdicts.interval import Array, Interval, mean
from normexp.verdicts.metric import Estimate, Metric, describe_metric
from normexp.verdicts.slices import NormAtSize, Slice
from normexp.words import format_count

REFERENCES = ("batch", "as_built")  # the first that a slice has, unless one is named
DIFFERENCE = "difference [95 %]"
ADDED = "†"  # some of the seeds were added by a later command
NOTHING = Interval(None, None, None, 0)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The difference between two cells of a slice, paired by seed; positive: the first is better.

    sizes: of the first and of the second, along the axis of the slice
    gap: in the unit of the metric; without a value where the two must not be compared
    verdict: None where none is allowed; `why` says why
    num_samples: test samples; 0: not recorded for every run, so the gap is over seeds alone
    is_comparable: both were trained with the same settings, so it belongs to the family
    family_size: the number of differences that share the error rate
    """

    slice: Slice = field(repr=False)
    first: NormAtSize = field(repr=False)
    second: NormAtSize = field(repr=False)
    sizes: tuple[int, int]
    gap: Interval
    num_samples: int
    why: str
    is_comparable: bool
    verdict: Verdict | None = None
    family_size: int = 0

    @property
    def is_along_sizes(self) -> bool:
        return self.first.norm == self.second.norm

    @property
    def norm(self) -> str:
        """The first norm, with its size if both norms are the same."""
        return f"{self.first.norm} at {self.sizes[0]}" if self.is_along_sizes else self.first.norm

    @property
    def against(self) -> str:
        return f"{self.second.norm} at {self.sizes[1]}" if self.is_along_sizes else self.second.norm

    @property
    def arm(self) -> str:
        """As `norm`, where something else is compared."""
        return self.norm

    @property
    def is_extended(self) -> bool:
        """True if some of its seeds were added after those that the first command declared."""
        return any(cell.is_extended for cell in (*self.first.cells, *self.second.cells))

    @property
    def mark(self) -> str:
        """The mark of a verdict that rests on added seeds."""
        return ADDED if self.is_extended and self.verdict is not None else ""

    @property
    def row(self) -> dict[str, Any]:
        """The difference as every table prints it."""
        return {
            self.slice.arm: self.norm,
            "against": self.against,
            DIFFERENCE: Estimate(self.gap, self.slice.metric.digits, is_signed=True),
            "verdict": (self.verdict or "-") + self.mark,
            "why": self.why,
            "n": self.gap.n or None,
        }


def compare(slices: Sequence[Slice], reference: str | None = None) -> list[Comparison]:
    """Every comparison of the slices of one report, with its verdict.

    reference: norm that the others are compared with where it was run; None: batch norm
    """
    comparisons, family_sizes = [], Counter[Any]()
    for slice_ in slices:
        of_slice = [*_comparisons_of(slice_, reference)]
        comparisons += of_slice
        family_sizes[slice_.family] += sum(comparison.is_comparable for comparison in of_slice)
        # The marks of a ranking are tests as well, see Ranking.
        family_sizes[slice_.family] += math.ceil(max(len(slice_.compared) - 2, 0) / 2)
    return [judge(comparison, family_sizes[comparison.slice.family]) for comparison in comparisons]


def judge(comparison: Comparison, family_size: int) -> Comparison:
    """The comparison with its verdict, if one is allowed."""
    comparison = replace(comparison, family_size=family_size)
    metric, gap = comparison.slice.metric, comparison.gap
    if comparison.why:
        return comparison
    if gap.low is None:
        return replace(comparison, why="one seed" if gap.n == 1 else "same value for every seed")
    sides = (comparison.first, comparison.second)
    reasons = [f"{side.norm}: {side.lost}" for side in sides if side.lost]
    if gap.n < max(len(side.seeds) for side in sides):
        reasons.append(f"{format_count(gap.n, 'seed')} in common")
    if comparison.slice.has_samples and not comparison.num_samples:
        reasons.append("over seeds alone")
    verdict = decide(gap, margin=metric.tolerance, family_size=family_size)
    if verdict == "undecided" and not reasons:
        reasons.append(_why_undecided(gap, metric, family_size))
    return replace(comparison, verdict=verdict, why="; ".join(dict.fromkeys(reasons)))


def _why_undecided(gap: Interval, metric: Metric, family_size: int) -> str:
    """`excludes 0, but not after correction for 4 comparisons`, or what would have been decided."""
    assert gap.low is not None and gap.high is not None
    if not gap.low <= 0 <= gap.high:
        count = format_count(family_size, "comparison")
        return f"excludes 0, but not after correction for {count}"
    least = least_decided(gap, family_size=family_size)
    size = f"{least:.{metric.digits}f} {metric.unit}".strip()
    return f"seeds differ too much: {size} would be decided"


def reference_of(compared: Mapping[str, NormAtSize], name: str | None = None) -> NormAtSize:
    """The norm that the others are compared with: the first of REFERENCES unless one is named.

    Of several with its name, as in a sweep of a knob, the one as shipped.
    """
    for wanted in (name, *REFERENCES):
        named = [side for side in compared.values() if wanted in (side.norm, side.best.norm_name)]
        if named:  # the one with the fewest knobs is as shipped, if that was run
            return min(named, key=lambda side: side.best.num_knobs)
    return next(iter(compared.values()))


def _comparisons_of(slice_: Slice, reference_name: str | None) -> Iterator[Comparison]:
    """The comparisons of a slice: along the sizes, then with the reference."""
    for norm, line in slice_.lines.items():
        smallest, largest = min(line), max(line)
        if len(line) > 1 and norm not in slice_.independent:
            yield compare_pair(slice_, line[smallest], line[largest], (smallest, largest))
    compared = slice_.compared
    reference = reference_of(compared, reference_name)
    for norm, line in slice_.lines.items():
        if norm != reference.norm:
            first = compared.get(norm, line[min(line)])
            yield compare_pair(slice_, first, reference, (slice_.at, slice_.at))


def compare_pair(
    slice_: Slice, first: NormAtSize, second: NormAtSize, sizes: tuple[int, int]
) -> Comparison:
    """The comparison of two norms or sizes, not yet judged."""
    metric = slice_.metric
    why = _why_not_compared(slice_, first, second, sizes)
    is_comparable, gap, num_samples = not why, NOTHING, 0
    a, b = paired(first, second)
    if is_comparable and a.size:
        step = first.best.step(metric)
        if a.ndim == 2:
            num_samples = a.shape[1]
            step = metric.limit / num_samples if metric.bounds else step
        gap = difference(a, b, step=step, limit=metric.limit)
    why = (
        why
        or first.why_incomplete
        or second.why_incomplete
        or _why_not_searched(first, second)
        or ("" if a.size else _why_not_paired(first, second))
    )
    return Comparison(slice_, first, second, sizes, gap, num_samples, why, is_comparable)


def _why_not_compared(
    slice_: Slice, first: NormAtSize, second: NormAtSize, sizes: tuple[int, int]
) -> str:
    """`not compared: lr 0.1 and 0.3`; empty if both were trained with the same settings."""
    if slice_.lines[first.norm].get(sizes[0]) is not first:
        return f"not run{slice_.at_words}"
    is_tuned, tuned = len(first.cells) > 1 or len(second.cells) > 1, first.best.roles.tuned
    words = []
    if first.best.runs and second.best.runs:  # the settings of planned cells are not known
        searched = [tuned] if is_tuned and tuned else []
        different = unlike(first.best, second.best, searched=searched)
        for key, (a, b) in different.items():
            words.append(f"{key} {value_words(a)} and {value_words(b)}")
    if is_tuned and first.rates != second.rates:
        words.append(f"{tuned} not searched alike")
    if words:
        more = f" and {len(words) - 2} more" if len(words) > 2 else ""
        return f"not compared: {', '.join(words[:2])}{more}"
    return "INVALID" if any(cell.invalid for cell in (*first.cells, *second.cells)) else ""


def _why_not_searched(first: NormAtSize, second: NormAtSize) -> str:
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


def _why_not_paired(first: NormAtSize, second: NormAtSize) -> str:
    if not {*first.seeds} & {*second.seeds}:
        return "no seed in common"
    return f"tuned over different seeds ({len(first.seeds)} and {len(second.seeds)})"


def paired(first: NormAtSize, second: NormAtSize) -> tuple[Array, Array]:
    """Outcomes of the same shape, higher is better, at the seeds that both have.

    A tuned norm is compared at all of its seeds, or not at all.
    """
    seeds = sorted({*first.seeds} & {*second.seeds})
    sides = (first, second)
    if not seeds or any(side.tuning and side.seeds != seeds for side in sides):
        return np.empty(0), np.empty(0)
    outcomes = [side.outcomes[[side.seeds.index(seed) for seed in seeds]] for side in sides]
    a, b = outcomes
    if a.shape != b.shape:  # one of them has no samples
        a, b = (values.reshape(len(seeds), -1).mean(axis=1) for values in outcomes)
    return a, b


# Rankings


@dataclass(frozen=True, eq=False)
class Place:
    """A norm in a ranking.

    norm_at_size: None if it was not run where norms are compared
    comparison: with the reference; None for the reference itself
    may_be_best: None if it is not ranked
    """

    norm: str
    norm_at_size: NormAtSize | None
    comparison: Comparison | None
    may_be_best: bool | None = None


@dataclass(frozen=True)
class Ranking:
    """Norms by their estimate, the best first; those that cannot be compared stand last.

    A norm may be the best unless another is shown to be better. The true best norm is left out by
    mistake if any of k - 1 one-sided tests errs; two of these count as one member of the family.
    Together with the verdicts against the reference, the error rate is at most 5 %.
    """

    slice: Slice
    reference: str
    places: Sequence[Place]
    family_size: int

    @property
    def best(self) -> list[str]:
        """The norms that may be the best."""
        return [place.norm for place in self.places if place.may_be_best]


def rank(slice_: Slice, comparisons: Sequence[Comparison]) -> Ranking:
    """The norms of a slice at the size where they are compared, as these comparisons say."""
    with_reference = {
        comparison.norm: comparison
        for comparison in comparisons
        if comparison.slice is slice_ and not comparison.is_along_sizes
    }
    of_reference = next(iter(with_reference.values()))
    compared = slice_.compared
    levels = dict.fromkeys(slice_.lines, -math.inf)
    for norm, norm_at_size in compared.items():
        if norm_at_size.mean.estimate is not None:
            levels[norm] = slice_.metric.sign * norm_at_size.mean.estimate
    ranked = [
        norm
        for norm in compared
        if norm not in with_reference or with_reference[norm].verdict is not None
    ]
    may_be_best: dict[str, bool] = {}
    for norm in ranked if len(ranked) > 1 else ():
        may_be_best[norm] = True
        for rival in ranked:
            if levels[rival] > levels[norm]:
                sizes = (slice_.at, slice_.at)
                pair = compare_pair(slice_, compared[rival], compared[norm], sizes)
                if judge(pair, of_reference.family_size).verdict == "better":
                    may_be_best[norm] = False
                    break
    places = [
        Place(norm, compared.get(norm), with_reference.get(norm), may_be_best.get(norm))
        for norm in sorted(slice_.lines, key=lambda norm: (norm not in ranked, -levels[norm]))
    ]
    return Ranking(slice_, of_reference.against, places, of_reference.family_size)


# Causes

SUFFIXES_OF_CAUSES = ("", "@precise", "@own_share")


@dataclass(frozen=True)
class Causes:
    """The terms of a drop, in the unit of the metric; positive where the smallest size is worse.

    A trained network is evaluated with running averages (r), with precise statistics (p), and with
    these after a sample's own moments got their weight in training (s); see
    training/statistics.py. From the largest size (L) to the smallest (S), for each seed,

        r_L - r_S = (s_L - s_S)                  training noise: what the weights have lost
                  + (s - p)_S - (s - p)_L        own share: each sample shaped its own statistics
                  + (p - r)_S - (p - r)_L        averages: they miss the population

    These are the terms of `normexp.diagnose` between two sizes.
    """

    norm: str
    metric: Metric
    drop: Interval
    terms: Mapping[str, Interval]


def measure_causes(comparison: Comparison) -> Causes | None:
    """The causes of a norm's drop; None if fewer than two seeds have all kinds of statistics."""
    metric = comparison.slice.metric
    is_along = comparison.is_along_sizes and comparison.slice.axis == "norm_batch_size"
    if not is_along or "@" in metric.name:
        return None
    large, small = comparison.second.best, comparison.first.best
    kinds = [describe_metric(metric.name + kind) for kind in SUFFIXES_OF_CAUSES]
    by_seed = [[cell.values(kind) for kind in kinds] for cell in (large, small)]
    seeds = sorted(set[int].intersection(*(set(values) for cell in by_seed for values in cell)))
    if len(seeds) < 2:
        return None
    values = np.array([[[of[seed] for seed in seeds] for of in cell] for cell in by_seed])
    running, precise, own_share = metric.sign * (values[0] - values[1])  # each (n,)
    step = small.step(metric)
    terms = {
        "training noise": mean(own_share, step=step),
        "own share": mean(precise - own_share, step=step),
        "averages": mean(running - precise, step=step),
    }
    return Causes(comparison.norm, metric, mean(running, step=step), terms)
