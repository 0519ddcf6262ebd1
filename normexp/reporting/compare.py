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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from normexp.config.words import as_typed, format_count
from normexp.reporting.cells import base_of, unlike
from normexp.reporting.metric import Metric, describe_metric, signed
from normexp.reporting.slices import Grid, Slice
from normexp.stats.family import ALPHA, Verdict, decide, difference, p_value
from normexp.stats.interval import LEVEL, Array, Interval, mean

REFERENCES = ("batch", "as_built")  # unless one is named: the first that a slice has
DIFFERENCE = "difference [95 %]"
ADDED = "†"  # some of the seeds were added by a later command
NOTHING = Interval(None, None, None, LEVEL, 0)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The difference between two cells of a slice, paired by seed; positive: the first is better.

    norm, against: names of the two, with the size if they are one norm at two
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
    norm: str
    against: str
    is_along_sizes: bool
    sizes: tuple[int, int]
    gap: Interval
    num_samples: int
    why: str
    is_comparable: bool
    is_extended: bool
    verdict: Verdict | None = None
    family_size: int = 0

    @property
    def row(self) -> dict[str, str]:
        """The difference as every table prints it."""
        return {
            "norm": self.norm,
            "against": self.against,
            DIFFERENCE: signed(self.gap, self.part.metric) if self.is_comparable else "-",
            "verdict": verdict_words(self),
            "why": self.why,
            "n": str(self.gap.n or "-"),
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
    verdict = decide(known.gap, margin=known.part.metric.tolerance, family_size=family_size)
    words = [f"{one.norm}: {one.lost}" for one in (known.first, known.second) if one.lost]
    if known.gap.n < max(len(known.first.seeds), len(known.second.seeds)):
        words.append(f"{format_count(known.gap.n, 'seed')} in common")
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
    grids, is_tuned = (first, second), len(first.rates) > 1 or len(second.rates) > 1
    different = {}
    if first.best.runs and second.best.runs:  # of planned cells little is known
        different = unlike(first.best, second.best, searched=["lr"] if is_tuned else [])
    words = [f"{key} {as_typed(a)} and {as_typed(b)}" for key, (a, b) in different.items()]
    words += ["lr not searched alike"] if is_tuned and first.rates != second.rates else []
    why = ""
    if words:
        more = f" and {len(words) - 2} more" if len(words) > 2 else ""
        why = f"not compared: {', '.join(words[:2])}{more}"
    elif any(cell.invalid for grid in grids for cell in grid.cells):
        why = "INVALID"
    a, b = paired(first, second)
    gap = NOTHING
    num_samples = a.shape[1] if a.ndim == 2 else 0
    if a.size:
        step, limit = first.best.step(part.metric), part.metric.limit
        step = limit / num_samples if num_samples and part.metric.bounds else step
        gap = difference(a, b, step=step, limit=limit)
    is_comparable = not why
    why = why or next(filter(None, (grid.why_incomplete for grid in grids)), "")
    why = why or _why_not_searched_alike(first, second)
    is_along = first.norm == second.norm
    names = [f"{grid.norm} at {size}" for grid, size in zip(grids, sizes, strict=True)]
    return Comparison(
        part=part,
        first=first,
        second=second,
        norm=names[0] if is_along else first.norm,
        against=names[1] if is_along else second.norm,
        is_along_sizes=is_along,
        sizes=sizes,
        gap=gap,
        num_samples=num_samples,
        why=why or ("" if a.size else _why_not_paired(first, second)),
        is_comparable=is_comparable,
        is_extended=any(cell.is_extended for grid in grids for cell in grid.cells),
    )


def _why_not_searched_alike(first: Grid, second: Grid) -> str:
    """Empty if no search chose their values, or one with the same points for both.

    The seeds that it compared were the luckiest at these values, so none of them may count again.
    """
    searches = [grid.best.search for grid in (first, second)]
    if searches[0] != searches[1]:
        return (
            f"{' and '.join(sorted(first.best.searched | second.best.searched))} not searched alike"
        )
    if (search := searches[0]) is None:
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
    if a.shape == b.shape:
        return a, b
    return (a if a.ndim == 1 else a.mean(axis=1)), (b if b.ndim == 1 else b.mean(axis=1))


# Rankings


@dataclass(frozen=True, eq=False)
class Place:
    """A norm in a ranking.

    grid: None if it was not run where norms are compared
    n: seeds of the reference, pairs of seeds of the others
    gap: to the reference, positive if better; None for the reference
    may_be_best: None if it is not ranked; `why` says for what reason
    """

    norm: str
    grid: Grid | None
    n: int
    gap: Interval | None = None
    verdict: Verdict | None = None
    why: str = ""
    is_extended: bool = False
    may_be_best: bool | None = None


@dataclass(frozen=True)
class Ranking:
    """Norms by their estimate, the best first; those that cannot be compared stand last.

    A norm may be the best unless another one is shown to be better. The best norm is left out by
    mistake if any other is found to be better than it: k - 1 one-sided tests, two of which count as
    one member of the family. Together with the verdicts against the reference, that is at most 5 %.
    """

    part: Slice
    reference: str
    places: Sequence[Place]
    family_size: int

    @property
    def best(self) -> list[str]:
        """The norms that may be the best."""
        return [place.norm for place in self.places if place.may_be_best]


def rank(part: Slice, comparisons: Sequence[Comparison], reference: str | None = None) -> Ranking:
    """The norms of a slice at the size where they are compared.

    comparisons, reference: of the report, see `compare`
    """
    grids = part.compared
    name = reference_of(list(grids), reference)
    against = {
        one.first.norm: one for one in comparisons if one.part is part and not one.is_along_sizes
    }
    family_size = max((one.family_size for one in against.values()), default=1)

    def gap_of(first: str, second: str) -> Interval:
        pair = compare_grids(part, grids[first], grids[second], (part.at, part.at))
        return pair.gap if judge(pair, family_size).verdict else NOTHING

    places = []
    for norm, grid in grids.items():
        place = Place(norm, grid, len(grid.seeds), why=grid.lost)
        if norm != name:
            one = against[norm]
            gap = one.gap if one.is_comparable else None
            place = replace(place, n=one.gap.n, gap=gap, verdict=one.verdict, why=one.why,
                            is_extended=one.is_extended)  # fmt: skip
        places.append(place)
    elsewhere = [norm for norm in part.norms if norm not in grids]
    places += [Place(norm, None, 0, why=f"not run{part.at_words}") for norm in elsewhere]
    levels = dict.fromkeys(elsewhere, -math.inf) | {
        norm: -math.inf if grid.mean.estimate is None else grid.sign * grid.mean.estimate
        for norm, grid in grids.items()
    }
    places = _sorted(places, name, levels, gap_of, family_size)
    return Ranking(part, name, places, family_size)


def _sorted(
    places: Sequence[Place],
    reference: str,
    levels: Mapping[str, float],
    gap_of: Callable[[str, str], Interval],
    family_size: int,
) -> list[Place]:
    """The places in order of their levels, with a mark for those that no other one beats."""
    ranked = [one.norm for one in places if one.norm == reference or one.verdict is not None]

    def is_beaten(norm: str) -> bool:
        gaps = (gap_of(rival, norm) for rival in ranked if levels[rival] > levels[norm])
        return any((g.estimate or 0.0) > 0 and family_size * p_value(g) <= ALPHA for g in gaps)

    marked = [
        replace(one, may_be_best=not is_beaten(one.norm))
        if one.norm in ranked and len(ranked) > 1
        else one
        for one in places
    ]
    return sorted(marked, key=lambda one: (one.norm not in ranked, -levels[one.norm]))


def verdict_words(one: Comparison | Place) -> str:
    """The verdict with the mark of added seeds; `-` without one."""
    return (one.verdict or "-") + ADDED * (one.is_extended and one.verdict is not None)


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
    if not comparison.is_along_sizes or "@" in metric.name:
        return None
    small, large = (grid.best for grid in (comparison.first, comparison.second))
    kinds = [describe_metric(metric.name + kind) for kind in STATISTICS]
    tables = [[cell.values(kind) for kind in kinds] for cell in (large, small)]
    seeds = sorted(set[int].intersection(*(set(known) for table in tables for known in table)))
    if len(seeds) < 2:
        return None
    values = [[[known[seed] for seed in seeds] for known in table] for table in tables]
    of_large, of_small = comparison.first.sign * np.array(values)  # (3 statistics, n)
    running, precise, own_share = of_large - of_small
    terms = {
        "training noise": own_share,
        "own share": precise - own_share,
        "averages": running - precise,
    }
    step = small.step(metric)
    shown = {name: mean(term, step=step) for name, term in terms.items()}
    return Causes(comparison.norm, metric, mean(running, step=step), shown)
