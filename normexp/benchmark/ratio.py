"""Ratios of errors: between two norms on one workload, and averaged over workloads.

A ratio suits easy and hard workloads alike. Everything is on the scale of -log(error), higher is
better like every outcome, so `difference`, `change` and `verdict_on` of contrast.py take
its values: a gap g says that the first error is exp(-g) times the second, see `as_ratio`. Outcomes
that are logarithms already, such as -bits per byte * ln 2, need no `log_outcomes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from normexp.benchmark.contrast import Assessment, Margin, difference
from normexp.stats.interval import LEVEL, Array, Interval, t_interval

# Of a norm to itself: known without error.
ONE = Assessment(Interval(0.0, 0.0, 0.0, LEVEL, 0, math.inf, 0.0), [])


def log_outcomes(outcomes: ArrayLike, *, perfect: float = 100.0) -> Array:
    """Values whose mean is -log(mean error), and whose spread gives its error (delta method).

    With the error e = perfect - outcome and its mean m, these are -log m - (e - m) / m. No error at
    all counts as half a test sample (without samples: half of 1e-9 of `perfect`).

    outcomes: (n,) or (n, N) with test samples, higher is better; also values of `cross_fit`
    """
    errors = perfect - np.asarray(outcomes, dtype=np.float64)
    one_sample = perfect / errors.shape[1] if errors.ndim == 2 else 1e-9 * perfect
    mean = max(float(errors.mean()), one_sample / 2)
    return -math.log(mean) - (errors - errors.mean()) / mean


def error_ratio(
    first: ArrayLike, second: ArrayLike, *, margin: float = math.inf, perfect: float = 100.0
) -> Assessment:
    """How many times the second error the first is, paired by seed (and test sample).

    margin: on the logarithmic scale; log(1.05): ratios within 5 % count as equal
    """
    a, b = (log_outcomes(outcomes, perfect=perfect) for outcomes in (first, second))
    step = None
    if a.ndim == 2:  # of one test sample, at the smaller of the two errors
        step = math.exp(max(a.mean(), b.mean())) * perfect / a.shape[1]
    return difference(a, b, Margin(cap=margin), step=step)


def over_workloads(ratios: Sequence[Assessment]) -> Assessment:
    """The mean of independent differences: of logarithms, the geometric mean of the ratios.

    Every workload weighs the same, and other workloads may differ. Its standard error is that of
    independent means, with Satterthwaite's degrees of freedom; workloads on the same test images
    count as independent, too.
    """
    rest = None
    if any(ratio.without_apart for ratio in ratios):
        rest = over_workloads([ratio.without_apart or ratio for ratio in ratios])
    distances = [ratio.distances for ratio in ratios]
    return Assessment(
        _mean_of([ratio.gap for ratio in ratios]),
        [_mean_of(same) for same in zip(*distances, strict=True)],
        sum(ratio.num_apart for ratio in ratios),
        rest,
    )


def as_ratio(gap: Interval) -> Interval:
    """exp(-gap): the first error as a multiple of the second, below 1 where the first is better.

    It has no `df` and `error`, since it is no t interval.
    """
    low, high = (None if x is None else math.exp(-x) for x in (gap.high, gap.low))
    estimate = None if gap.estimate is None else math.exp(-gap.estimate)
    return Interval(estimate, low, high, gap.level, gap.n)


def _mean_of(intervals: Sequence[Interval]) -> Interval:
    """The mean of independent estimates; without bounds if one has none."""
    n, count = sum(interval.n for interval in intervals), len(intervals)
    estimates = [x.estimate for x in intervals if x.estimate is not None]
    if not count or len(estimates) < count:
        return Interval(None, None, None, LEVEL, n)
    estimate = sum(estimates) / count
    tests = [(x.df, x.error) for x in intervals]
    alone = [x.over_seeds or (x.df, x.error) for x in intervals]
    both, over_seeds = (_t_of(known, estimate, n) for known in (tests, alone))
    if both.low is None or over_seeds.low is None:
        return Interval(estimate, None, None, LEVEL, n)
    if not any(x.over_seeds for x in intervals) or None in (over_seeds.df, over_seeds.error):
        return both
    wider = both if both.low < over_seeds.low else over_seeds
    test_over_seeds = (over_seeds.df, over_seeds.error)
    return replace(both, low=wider.low, high=wider.high, over_seeds=test_over_seeds)


def _t_of(tests: Sequence[tuple[float | None, float | None]], estimate: float, n: int) -> Interval:
    """The t interval of a mean of independent estimates with these (df, standard error)."""
    known = [(df, error) for df, error in tests if df is not None and error is not None]
    if len(known) < len(tests):
        return Interval(estimate, None, None, LEVEL, n)
    squares = sum(error**2 for _, error in known)
    spread = sum(error**4 / df for df, error in known)
    freedom = squares**2 / spread if spread else 0.0
    return t_interval(estimate, math.sqrt(squares) / len(known), freedom, n=n)
