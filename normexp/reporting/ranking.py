"""The ranking of norms, of a study and of the benchmark: a flat table sorted by estimate.

A norm may be the best unless another one is shown to be better. The best norm is left out by
mistake if any other is found to be better than it: k - 1 one-sided tests, two of which count as one
member of the family. Together with the verdicts against the reference, that is at most 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normexp.reporting.compare import (
    NOTHING,
    Comparison,
    compare_grids,
    judge,
    paired,
    reference_of,
)
from normexp.reporting.slices import Grid, Slice
from normexp.stats.family import ALPHA, Verdict, decide, difference, p_value
from normexp.stats.interval import Interval
from normexp.stats.ratio import log_outcomes, over_workloads

MARGIN_OF_RATIO = math.log(1.05)  # ratios of errors within 5 % count as equal
BEST = "●"
NOTE = f"{BEST} may be the best: no other norm is shown to be better, which is no order among them."


@dataclass(frozen=True, eq=False)
class Place:
    """A norm in a ranking.

    value: its mean as shown; of several workloads its error as a multiple of the reference's
    gap: to the reference, positive if better; of several workloads the logarithm of the ratio of
        errors; None for the reference
    may_be_best: None if it is not ranked; `why` says for what reason
    """

    norm: str
    value: Interval
    gap: Interval | None
    verdict: Verdict | None
    why: str
    may_be_best: bool | None
    n: int
    is_extended: bool = False


@dataclass(frozen=True)
class Ranking:
    """Norms by their estimate, the best first; those that cannot be compared stand last.

    part: the slice, or None over several workloads
    """

    title: str
    reference: str
    places: Sequence[Place]
    family_size: int
    part: Slice | None = None

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
    ranked = [name, *(norm for norm, one in against.items() if one.verdict is not None)]

    def gap_of(first: str, second: str) -> Interval:
        pair = compare_grids(part, grids[first], grids[second], (part.at, part.at))
        return pair.gap if judge(pair, family_size).verdict else NOTHING

    best = _best_of(ranked, {norm: _level(grids[norm]) for norm in ranked}, gap_of, family_size)
    places = [
        Place(
            norm=norm,
            value=grid.mean,
            gap=against[norm].gap if norm in against and against[norm].is_comparable else None,
            verdict=against[norm].verdict if norm in against else None,
            why=against[norm].why if norm in against else grid.lost,
            may_be_best=norm in best if norm in ranked and len(ranked) > 1 else None,
            n=len(grid.seeds),
            is_extended=norm in against and against[norm].is_extended,
        )
        for norm, grid in grids.items()
    ]
    places.sort(key=lambda place: (place.norm not in ranked, -_level(grids[place.norm])))
    return Ranking(part.heading, name, places, family_size, part)


def overall(slices: Sequence[Slice], reference: str | None = None) -> Ranking | None:
    """The norms that every slice compares, by the geometric mean of their errors; None without two.

    The error of a norm is a multiple of that of the reference in the same slice. The comparisons of
    this table are one family.
    """
    first = slices[0].compared if slices else {}
    common = [norm for norm in first if all(norm in part.compared for part in slices)]
    if len(slices) < 2 or len(common) < 2:
        return None
    name = reference_of(common, reference)
    known = {norm: [_why_not(part, norm, name) for part in slices] for norm in common}
    ranked = [norm for norm in common if not any(known[norm])]
    family_size = len(common) - 1 + math.ceil(max(len(common) - 2, 0) / 2)

    def gap_of(first: str, second: str) -> Interval:
        return over_workloads([ratio_gap(part, first, second) for part in slices])

    gaps = {norm: gap_of(norm, name) for norm in ranked if norm != name}
    levels = {norm: gaps[norm].estimate or 0.0 if norm in gaps else 0.0 for norm in ranked}
    best = _best_of(ranked, levels, gap_of, family_size)
    places = [
        Place(
            norm=norm,
            value=gaps.get(norm, NOTHING),
            gap=gaps.get(norm),
            verdict=decide(gaps[norm], margin=MARGIN_OF_RATIO, family_size=family_size)
            if norm in gaps
            else None,
            why=next(filter(None, known[norm]), ""),
            may_be_best=norm in best if norm in ranked and len(ranked) > 1 else None,
            n=min(len(part.compared[norm].seeds) for part in slices),
        )
        for norm in common
    ]
    places.sort(key=lambda place: (place.norm not in ranked, -levels.get(place.norm, 0.0)))
    titles = ", ".join(part.heading for part in slices)
    return Ranking(f"over {len(slices)} workloads ({titles})", name, places, family_size)


def ratio_gap(part: Slice, first: str, second: str) -> Interval:
    """-log of the first error as a multiple of the second, at the size where norms are compared."""
    a, b = paired(part.compared[first], part.compared[second])
    if not a.size:
        return NOTHING
    if part.metric.unit == "bits per byte":  # logarithms already
        return difference(math.log(2) * a, math.log(2) * b)
    perfect = part.metric.bounds[1] if part.metric.bounds else 0.0
    return difference(log_outcomes(a, perfect=perfect), log_outcomes(b, perfect=perfect))


def _why_not(part: Slice, norm: str, reference: str) -> str:
    if norm == reference:
        return ""
    pair = compare_grids(part, part.compared[norm], part.compared[reference], (part.at, part.at))
    return f"{part.title}: {pair.why}" if pair.why else ""


def _best_of(
    norms: Sequence[str],
    levels: dict[str, float],
    gap_of: Callable[[str, str], Interval],
    family_size: int,
) -> set[str]:
    """The norms that no other one beats."""

    def is_beaten(norm: str) -> bool:
        for rival in norms:
            if levels[rival] > levels[norm]:
                gap = gap_of(rival, norm)
                if (gap.estimate or 0.0) > 0 and family_size * p_value(gap) <= ALPHA:
                    return True
        return False

    return {norm for norm in norms if not is_beaten(norm)}


def _level(grid: Grid) -> float:
    return -math.inf if grid.mean.estimate is None else grid.sign * grid.mean.estimate
