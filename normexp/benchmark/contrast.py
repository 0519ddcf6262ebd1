"""One difference of a report: its interval, its margin, and the verdict on it.

Outcomes are higher-is-better (negate losses), over the same seeds in the same order: (n,), or
(n, N) with the N test samples of each seed, whose mean over samples is the seed's value. With
samples every interval is for new seeds and new samples; without, for new seeds on the same samples.
Tuned norms give the pseudo-values of normexp.stats.crossfit instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from normexp.benchmark.family import Verdict, decide, distances_to
from normexp.benchmark.outliers import lies_apart
from normexp.stats.interval import Array, Interval, crossed_mean, mean, smallest_step

Seeds = Literal["undeclared", "incomplete", "complete", "extended"]


@dataclass(frozen=True)
class Margin:
    """Where a difference is small: below `cap`, and below `share` of the reference's error.

    cap: in the unit of the outcomes, 1 for points of accuracy
    share: of `perfect` - reference; 0: `cap` alone
    perfect: the best possible outcome
    """

    cap: float
    share: float = 0.0
    perfect: float = 100.0


@dataclass(frozen=True)
class Assessment:
    """A difference with the tests that its verdict takes.

    gap: the difference, over all seeds
    distances: from the gap to each margin, positive within
    num_apart: seeds whose difference lies apart (normexp.benchmark.outliers)
    without_apart: the same without those seeds; None where no seed lies apart
    """

    gap: Interval
    distances: Sequence[Interval]
    num_apart: int = 0
    without_apart: Assessment | None = None


def difference(
    first: ArrayLike, second: ArrayLike, margin: Margin, *, step: float | None = None
) -> Assessment:
    """first - second, to be compared with the margin; `second` is the reference.

    With d the difference and q = share, "within" takes that cap - d, cap + d, q (perfect - second)
    - d and q (perfect - second) + d are positive. Each is one mean over seeds (and samples), so the
    noise of the reference is inside.

    step: of a seed's value; see normexp.stats.interval
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}; pair outcomes by seed and sample first")
    return _assessed(a - b, b, margin, step)


def change(
    first: tuple[ArrayLike, ArrayLike],
    second: tuple[ArrayLike, ArrayLike],
    margin: Margin,
    *,
    step: float | None = None,
) -> Assessment:
    """How much a difference changes from the first budget to the second, paired by seed.

    (second[0] - second[1]) - (first[0] - first[1]), with the reference second[1]. Verdicts: `above`
    and `below` are "changes", `within` is "does not change by more than the margin".
    """
    (a, b), (c, d) = (
        tuple(np.asarray(x, dtype=np.float64) for x in pair) for pair in (first, second)
    )
    return _assessed((c - d) - (a - b), d, margin, step)


def verdict_on(assessment: Assessment, family_size: int) -> tuple[Verdict, bool]:
    """The verdict, and whether seeds that lie apart withhold another one.

    A verdict that is not the same without the seeds that lie apart is `open`. This only withholds
    verdicts, so the error rate of the family holds.
    """
    verdict = decide(assessment.gap, distances=assessment.distances, family_size=family_size)
    if assessment.without_apart is None:
        return verdict, False
    other, _ = verdict_on(assessment.without_apart, family_size)
    return (verdict, False) if verdict == other else ("open", True)


def state_of_seeds(recorded: int, declared: int) -> Seeds:
    """Whether a cell may be judged: only with exactly the seeds that were declared; 0: unknown.

    One look: a verdict on every look at a growing number of seeds would be false in about a fifth
    of studies. `incomplete` and `extended` cells show intervals and no verdict.
    """
    if not declared:
        return "undeclared"
    if recorded == declared:
        return "complete"
    return "incomplete" if recorded < declared else "extended"


def _assessed(gaps: Array, reference: Array, margin: Margin, step: float | None) -> Assessment:
    values = gaps if gaps.ndim == 1 else gaps.mean(axis=1)
    apart = lies_apart(values, step=step or smallest_step(values))
    rest = None
    if apart.any():
        rest = Assessment(*_intervals(gaps[~apart], reference[~apart], margin, step))
    return Assessment(*_intervals(gaps, reference, margin, step), int(apart.sum()), rest)


def _intervals(
    gaps: Array, reference: Array, margin: Margin, step: float | None
) -> tuple[Interval, list[Interval]]:
    gap = _mean(gaps, step)
    distances = distances_to(margin.cap, gap) if math.isfinite(margin.cap) else []
    if margin.share:
        error = margin.share * (margin.perfect - reference)
        distances += [_mean(error - gaps, step), _mean(error + gaps, step)]
    return gap, distances


def _mean(table: Array, step: float | None) -> Interval:
    return mean(table, step=step) if table.ndim == 1 else crossed_mean(table, step=step)
