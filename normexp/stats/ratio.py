"""Ratios of errors: between two norms on one workload, and averaged over workloads.

A ratio suits easy and hard workloads alike. Everything is on the scale of -log(error), higher is
better like every outcome: a gap g says that the first error is exp(-g) times the second. Outcomes
that are logarithms already, such as -bits per byte * ln 2, need no `log_outcomes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from normexp.stats.interval import LEVEL, Array, Interval, t_interval


def log_outcomes(outcomes: ArrayLike, *, perfect: float = 100.0) -> Array:
    """Values whose mean is -log(mean error), and whose spread gives its error (delta method).

    With the error e = perfect - outcome and its mean m, these are -log m - (e - m) / m. No error at
    all counts as half a test sample (without samples: half of 1e-9 of `perfect`).

    outcomes: (n,) or (n, N) with test samples, higher is better; also values of `cross_fit`
    """
    errors = perfect - np.asarray(outcomes, dtype=np.float64)
    one_sample = max(abs(perfect), 1.0) * (1 / errors.shape[1] if errors.ndim == 2 else 1e-9)
    mean = max(float(errors.mean()), one_sample / 2)
    return -math.log(mean) - (errors - errors.mean()) / mean


def over_workloads(gaps: Sequence[Interval]) -> Interval:
    """The mean of independent differences: of logarithms, the geometric mean of the ratios.

    Every workload weighs the same, and the interval says nothing about other workloads. Its error
    is that of independent means, with Satterthwaite's degrees of freedom; workloads on the same
    test images count as independent, too. No bounds if one difference has none.
    """
    n, estimates = sum(gap.n for gap in gaps), [gap.estimate for gap in gaps]
    known = [estimate for estimate in estimates if estimate is not None]
    if not gaps or len(known) < len(gaps):
        return Interval(None, None, None, LEVEL, n)
    estimate = sum(known) / len(known)
    if any(gap.low is None or gap.df is None or gap.error is None for gap in gaps):
        return Interval(estimate, None, None, LEVEL, n)
    both = _t_of([gap.t_tests[0] for gap in gaps], estimate, n)
    if not any(gap.over_seeds for gap in gaps):
        return both
    alone = _t_of([gap.t_tests[-1] for gap in gaps], estimate, n)
    if both.low is None or alone.low is None or alone.df is None or alone.error is None:
        return both
    wider = both if both.low < alone.low else alone
    return replace(both, low=wider.low, high=wider.high, over_seeds=(alone.df, alone.error))


def as_ratio(gap: Interval) -> Interval:
    """exp(-gap): the first error as a multiple of the second, below 1 where the first is better.

    It has no `df` and `error`, since it is no t interval.
    """
    low, high = (None if x is None else math.exp(-x) for x in (gap.high, gap.low))
    estimate = None if gap.estimate is None else math.exp(-gap.estimate)
    return Interval(estimate, low, high, gap.level, gap.n)


def _t_of(tests: Sequence[tuple[float, float]], estimate: float, n: int) -> Interval:
    """The t interval of a mean of independent estimates with these (df, standard error)."""
    squares = sum(error**2 for _, error in tests)
    spread = sum(error**4 / df for df, error in tests)
    freedom = squares**2 / spread if spread else 0.0
    return t_interval(estimate, math.sqrt(squares) / len(tests), freedom, n=n)
