"""Differences between two cells whose runs are matched by seed.

One seed gives every norm the same initialisation, order and augmentation, so the difference within
a seed is free of what these add to both. The caller intersects the seeds: row i of both arrays
belongs to one seed, and n says how many were matched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from normexp.stats.interval import Array, Interval, as_sample, t_interval
from normexp.stats.location import mean

EXACT_PAIRS = 12  # 2^12 sign patterns are listed; with more pairs they are drawn


def paired_difference(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Interval:
    """Mean of a - b, (n,) each and matched by seed, with the t interval of the differences.

    The interval belongs to scipy.stats.ttest_rel. One pair has no bounds, see `t_interval`.
    """
    return mean(_differences(a, b), level=level)


def stratified_difference(
    strata: Sequence[tuple[ArrayLike, ArrayLike]], *, level: float = 0.95
) -> Interval:
    """Mean over data sets of the mean paired difference; every data set has the same weight.

    strata: one (a, b) per data set, matched by seed within it; the data sets may differ in n.
    d = sum_k d_k / K, error = sqrt(sum_k v_k) / K with v_k = s_k^2 / n_k, and a t interval with
    (sum v)^2 / sum(v_k^2 / (n_k - 1)) degrees of freedom (Welch 1947, Satterthwaite 1946).
    The data sets are those at hand: nothing is said about data sets that were not tried.
    No bounds where a data set has one pair; no estimate where one has none, since leaving it out
    would answer another question. n counts all pairs.
    """
    differences = [_differences(a, b) for a, b in strata]
    counts = np.array([len(d) for d in differences])
    n, method = int(counts.sum()), "t over strata"
    if n == 0 or counts.min() == 0:
        return Interval(None, None, None, level, n, method)
    estimate = float(np.mean([d.mean() for d in differences]))
    if counts.min() == 1:
        return Interval(estimate, None, None, level, n, method)
    variances = np.array([d.var(ddof=1) for d in differences]) / counts
    total = float(variances.sum())
    shares = variances / total if total else np.full(len(counts), 1 / len(counts))
    df = 1 / float((shares**2 / (counts - 1)).sum())
    error = math.sqrt(total) / len(counts)
    return t_interval(estimate, error, df, level=level, n=n, method=method)


def sign_flip_p_value(
    strata: Sequence[tuple[ArrayLike, ArrayLike]],
    *,
    rng: np.random.Generator,
    resamples: int = 10_000,
) -> float:
    """Two-sided p of "a and b are exchangeable within a seed", by flipping signs of differences.

    strata: one (a, b) per data set, as in `stratified_difference`, whose estimate is the statistic.
    All 2^n patterns are counted up to n = 12 pairs (the p of scipy.stats.permutation_test with
    permutation_type="samples"); beyond, p = (1 + hits) / (1 + resamples) over drawn patterns
    (Phipson and Smyth 2010). The least p of n pairs is 2 / 2^n; without pairs p is 1.
    """
    differences = [_differences(a, b) for a, b in strata]
    weighted = [d / len(d) for d in differences if len(d)]
    contributions = np.concatenate([np.zeros(0), *weighted])
    n = len(contributions)
    exact = n <= EXACT_PAIRS
    if exact:
        signs = 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = rng.choice([-1.0, 1.0], size=(resamples, n))
    rounding = 1e-12 * np.abs(contributions).sum()  # equal sums may differ in their last digits
    extreme = np.abs(signs @ contributions) >= abs(contributions.sum()) - rounding
    return float(extreme.mean()) if exact else float((1 + extreme.sum()) / (1 + resamples))


def _differences(a: ArrayLike, b: ArrayLike) -> Array:
    first, second = as_sample(a), as_sample(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values; pair them by seed first")
    return first - second
