"""What a report may claim: differences with their verdicts, rankings, and the causes of a drop.

The differences of a slice are, for each norm that mixes samples, the smallest size against the
largest, and each norm against the reference norm at the smallest size. This rule fixes them before
any result is known. A family is a table: one model, data set and budget. The probability that any
verdict of a family is false is at most 5 % (normexp.stats.family), over new seeds and test samples.

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

from normexp.reporting.cells import base_of, unlike, value_words
from normexp.reporting.metric import Estimate, Metric, describe_metric
from normexp.reporting.slices import Grid, Slice
from normexp.stats.family import Verdict, decide, difference
from normexp.stats.interval import LEVEL, Array, Interval, mean
from normexp.words import format_count

REFERENCES = ("batch", "as_built")  # unless one is named: the first that a slice has
DIFFERENCE = "difference [95 %]"
ADDED = "†"  # some of the seeds were added by a later command
NOTHING = Interval(None, None, None, LEVEL, 0)


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

    part: Slice = field(repr=False)
    first: Grid = field(repr=False)
    second: Grid = field(repr=False)
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
        """Of the first, with its size if both have the same norm."""
        return self.first.norm + f" at {self.sizes[0]}" * self.is_along_sizes

    @property
    def against(self) -> str:
        return self.second.norm + f" at {self.sizes[1]}" * self.is_along_sizes

    @property
    def mark(self) -> str:
        """Of a verdict whose seeds were added after those that the first command declared."""
        return ADDED * (self.is_extended and self.verdict is not None)

    @property
    def is_extended(self) -> bool:
        return any(cell.is_extended for cell in (*self.first.cells, *self.second.cells))

    @property
    def row(self) -> dict[str, Any]:
        """The difference as every table prints it."""
        return {
            "norm": self.norm,
            "against": self.against,
            DIFFERENCE: Estimate(self.gap, self.part.metric.digits, is_signed=True),
            "verdict": (self.verdict or "-") + self.mark,
            "why": self.why,
            "n": self.gap.n or None,
        }


def compare(slices: Sequence[Slice], reference: str | None = None) -> list[Comparison]:
    """Every comparison of the slices of one report, with its verdict.

    reference: norm that the others are compared with where it was run; None: batch norm
    """
    comparisons = [one for part in slices for one in _comparisons_of(part, reference)]
    sizes = Counter(one.part.family for one in comparisons if one.is_comparable)
    for part in slices:  # the choice of the best norms, see Ranking
        sizes[part.family] += math.ceil(max(len(part.compared) - 2, 0) / 2)
    return [judge(one, sizes[one.part.family]) for one in comparisons]


def judge(comparison: Comparison, family_size: int) -> Comparison:
    """The comparison with its verdict, if one is allowed."""
    known = replace(comparison, family_size=family_size)
    if known.why:
        return known
    if known.gap.low is None:
        return replace(known, why="one seed" if known.gap.n == 1 else "same value for every seed")
    grids = (known.first, known.second)
    words = [f"{one.norm}: {one.lost}" for one in grids if one.lost]
    if known.gap.n < max(len(one.seeds) for one in grids):
        words.append(f"{format_count(known.gap.n, 'seed')} in common")
    if known.part.has_samples and not known.num_samples:
        words.append("over seeds alone")
    verdict = decide(known.gap, margin=known.part.metric.tolerance, family_size=family_size)
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
    grids = part.compared
    reference = grids[reference_of(list(grids), wanted)]
    for norm, line in part.lines.items():
        if norm != reference.norm:
            first = grids.get(norm, line[min(line)])
            yield compare_grids(part, first, reference, (part.at, part.at))


def compare_grids(part: Slice, first: Grid, second: Grid, sizes: tuple[int, int]) -> Comparison:
    """The comparison of two grids, not yet judged."""
    why, gap, num_samples = _why_not_compared(part, first, second, sizes), NOTHING, 0
    is_comparable = not why
    a, b = paired(first, second)
    if is_comparable and a.size:
        num_samples = a.shape[1] if a.ndim == 2 else 0
        step, limit = first.best.step(part.metric), part.metric.limit
        step = limit / num_samples if num_samples and part.metric.bounds else step
        gap = difference(a, b, step=step, limit=limit)
    reasons = (why, first.why_incomplete, second.why_incomplete, _why_not_searched(first, second))
    why = next(filter(None, reasons), "" if a.size else _why_not_paired(first, second))
    return Comparison(part, first, second, sizes, gap, num_samples, why, is_comparable)


def _why_not_compared(part: Slice, first: Grid, second: Grid, sizes: tuple[int, int]) -> str:
    """`not compared: lr 0.1 and 0.3`; empty if both were trained with the same settings."""
    if part.lines[first.norm].get(sizes[0]) is not first:
        return f"not run{part.at_words}"
    is_tuned = len(first.rates) > 1 or len(second.rates) > 1
    different = {}
    if first.best.runs and second.best.runs:  # of planned cells little is known
        different = unlike(first.best, second.best, searched=["lr"] if is_tuned else [])
    words = [f"{key} {value_words(a)} and {value_words(b)}" for key, (a, b) in different.items()]
    words += ["lr not searched alike"] if is_tuned and first.rates != second.rates else []
    if words:
        more = f" and {len(words) - 2} more" if len(words) > 2 else ""
        return f"not compared: {', '.join(words[:2])}{more}"
    return "INVALID" if any(cell.invalid for cell in (*first.cells, *second.cells)) else ""


def _why_not_searched(first: Grid, second: Grid) -> str:
    """Empty if no search chose their values, or one with the same points for both.

    The seeds that it compared were the luckiest at these values, so none of them may count again.
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


def _why_not_paired(first: Grid, second: Grid) -> str:
    if not {*first.seeds} & {*second.seeds}:
        return "no seed in common"
    return f"tuned over different seeds ({len(first.seeds)} and {len(second.seeds)})"


def paired(first: Grid, second: Grid) -> tuple[Array, Array]:
    """Outcomes of the same shape, higher is better, at the seeds that both have.

    A norm that a grid tunes is compared at all of its seeds, or not at all.
    """
    seeds = sorted({*first.seeds} & {*second.seeds})
    if any(grid.fit and grid.seeds != seeds for grid in (first, second)):
        return np.empty(0), np.empty(0)
    a, b = (grid.outcomes[[grid.seeds.index(seed) for seed in seeds]] for grid in (first, second))
    if a.shape != b.shape:  # one of them has no samples
        a, b = (values.reshape(len(seeds), -1).mean(axis=1) for values in (a, b))
    return a, b


# Rankings


@dataclass(frozen=True, eq=False)
class Place:
    """A norm in a ranking.

    grid: None if it was not run where norms are compared
    comparison: with the reference; None for the reference itself
    may_be_best: None if it is not ranked
    """

    norm: str
    grid: Grid | None
    comparison: Comparison | None
    may_be_best: bool | None = None

    @property
    def gap(self) -> Interval:
        """To the reference, positive if better; without a value for the reference."""
        return self.comparison.gap if self.comparison else NOTHING

    @property
    def verdict(self) -> Verdict | None:
        return self.comparison.verdict if self.comparison else None


@dataclass(frozen=True)
class Ranking:
    """Norms by their estimate, the best first; those that cannot be compared stand last.

    A norm may be the best unless another is shown to be better. The true best norm is left out by
    mistake if any of k - 1 one-sided tests errs; two of these count as one member of the family.
    Together with the verdicts against the reference, the error rate is at most 5 %.
    """

    part: Slice
    reference: str
    places: Sequence[Place]
    family_size: int

    @property
    def best(self) -> list[str]:
        """The norms that may be the best."""
        return [place.norm for place in self.places if place.may_be_best]


def rank(part: Slice, comparisons: Sequence[Comparison]) -> Ranking:
    """The norms of a slice at the size where they are compared, as these comparisons say."""
    own = [one for one in comparisons if one.part is part and not one.is_along_sizes]
    against, grids = {one.first.norm: one for one in own}, part.compared
    reference, family_size = own[0].against, own[0].family_size
    ranked = [norm for norm in grids if norm == reference or against[norm].verdict]
    levels = dict.fromkeys(part.lines, -math.inf)
    for norm, grid in grids.items():
        if grid.mean.estimate is not None:
            levels[norm] = grid.sign * grid.mean.estimate

    def is_beaten(norm: str) -> bool:
        better = (rival for rival in ranked if levels[rival] > levels[norm])
        pairs = (compare_grids(part, grids[one], grids[norm], (part.at, part.at)) for one in better)
        return any(judge(pair, family_size).verdict == "better" for pair in pairs)

    marks = {norm: not is_beaten(norm) for norm in ranked} if len(ranked) > 1 else {}
    places = [
        Place(norm, grids.get(norm), against.get(norm), marks.get(norm))
        for norm in sorted(part.lines, key=lambda norm: (norm not in ranked, -levels[norm]))
    ]
    return Ranking(part, reference, places, family_size)


# Causes

STATISTICS = ("", "@precise", "@own_share")


@dataclass(frozen=True)
class Causes:
    """The terms of a drop, in the unit of the metric; positive where the smallest size is worse.

    A trained network is evaluated with running averages (r), with precise statistics (p), and with
    these after a sample's own moments got their weight in training (s); see
    `normexp.training.evaluation`. From the largest size (L) to the smallest (S), for each seed,

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
    """The causes of a norm's drop; None where a kind of statistics has no two seeds at a size."""
    metric = comparison.part.metric
    is_along = comparison.is_along_sizes and comparison.part.axis == "norm_batch_size"
    if not is_along or "@" in metric.name:
        return None
    cells = (comparison.second.best, comparison.first.best)  # at the largest size, and the smallest
    kinds = [describe_metric(metric.name + kind) for kind in STATISTICS]
    tables = [[cell.values(kind) for kind in kinds] for cell in cells]
    seeds = sorted(set[int].intersection(*(set(known) for table in tables for known in table)))
    if len(seeds) < 2:
        return None
    values = [[[known[seed] for seed in seeds] for known in table] for table in tables]
    of_large, of_small = comparison.first.sign * np.array(values)  # (3 statistics, n)
    running, precise, own_share = of_large - of_small
    terms = {
        "drop": running,
        "training noise": own_share,
        "own share": precise - own_share,
        "averages": running - precise,
    }
    step = cells[1].step(metric)
    means = {name: mean(term, step=step) for name, term in terms.items()}
    return Causes(comparison.norm, metric, means.pop("drop"), means)
