"""Estimates with confidence intervals for a handful of seeds, as pure functions on arrays.

Every function takes samples of shape (num_runs,), or pairs of them matched by seed, and returns an
`Interval`. Where a sample is too small for an interval the bounds are None; they are never made up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, betaincinv, stdtr, stdtrit

Array = NDArray[np.float64]
ROUNDING = 1e-9  # a standard error below this share of the estimate is floating-point noise
LEVEL = 0.95  # of every interval
# The median of n = 5 has an interval of level .9375, not .95. It is given, with its true level;
# an interval that misses the wanted level by more than this is not.
LEVEL_SHORTFALL = 0.02


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    estimate: in the unit of the values; None if there are none
    low, high: the bounds; both None if the sample is too small
    level: nominal coverage in (0, 1)
    n: number of values (seeds, or pairs of seeds) used
    df: degrees of freedom of a t interval; None for other intervals
    """

    estimate: float | None
    low: float | None
    high: float | None
    level: float
    n: int
    df: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise ValueError(f"level={self.level} is not between 0 and 1; try level=0.95")
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has both bounds or neither")


def mean(values: ArrayLike) -> Interval:
    """Mean of values (n,) with Student's t interval, mean -+ t(n - 1) * s / sqrt(n).

    One value has no bounds, nor have a few equal ones (see `t_interval`).
    """
    sample = as_sample(values)
    n = len(sample)
    if n == 0:
        return Interval(None, None, None, LEVEL, 0)
    error = float(sample.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return t_interval(float(sample.mean()), error, n - 1, n=n)


def median(values: ArrayLike) -> Interval:
    """Median of values (n,) with a distribution-free interval from order statistics.

    [x(k), x(n+1-k)] covers the median with probability c(k) = 1 - 2 P(Bin(n, 1/2) <= k - 1). With
    the largest k such that c(k) >= level, the lower bound is moved inwards to
    (1-w) x(k) + w x(k+1), and the upper one likewise, with f = (c(k) - level) / (c(k) - c(k+1)) and
    w = (n-k) f / (k + (n-2k) f)
    (Hettmansperger and Sheather 1986, "Confidence intervals based on interpolated order
    statistics"). If even [x(1), x(n)] misses the level, the result has the level it reaches, or no
    bounds if that is more than LEVEL_SHORTFALL below (n <= 4 at 95 %).
    """
    sample = np.sort(as_sample(values))
    n = len(sample)
    if n == 0:
        return Interval(None, None, None, LEVEL, 0)
    centre = float(np.median(sample))
    widest = _median_coverage(1, n)
    if n == 1 or widest < LEVEL - LEVEL_SHORTFALL:
        return Interval(centre, None, None, LEVEL, n)
    if widest < LEVEL:
        return Interval(centre, float(sample[0]), float(sample[-1]), widest, n)
    k = max(k for k in range(1, n // 2 + 1) if _median_coverage(k, n) >= LEVEL)
    outer, inner = _median_coverage(k, n), max(_median_coverage(k + 1, n), 0.0)
    f = (outer - LEVEL) / (outer - inner)
    # Between the two middle values there is no inner interval to move towards.
    w = (n - k) * f / (k + (n - 2 * k) * f) if 2 * k < n else 0.0
    low = (1 - w) * sample[k - 1] + w * sample[k]
    high = (1 - w) * sample[n - k] + w * sample[n - k - 1]
    return Interval(centre, float(low), float(high), LEVEL, n)


def iqm(values: ArrayLike) -> Interval:
    """Interquartile mean of values (n,): the mean without the g = floor(n / 4) least and greatest.

    The estimate is scipy.stats.trim_mean(values, 0.25) and rliable's aggregate_iqm (Agarwal et al.
    2021, arXiv:2108.13264). The interval is iqm -+ t(h-1) * sqrt(W / (h (h-1))) with h = n - 2g
    and W the sum of squared deviations after each trimmed value is replaced by its nearest kept
    one (Tukey and McLaughlin 1963; in this form Yuen 1974). Below n = 4 nothing is trimmed.
    """
    sample = np.sort(as_sample(values))
    n = len(sample)
    if n == 0:
        return Interval(None, None, None, LEVEL, 0)
    g = n // 4
    kept = sample[g : n - g]
    h = len(kept)
    winsorized = np.clip(sample, kept[0], kept[-1])
    squares = float(((winsorized - winsorized.mean()) ** 2).sum())
    error = math.sqrt(squares / (h * (h - 1))) if h > 1 else 0.0
    return t_interval(float(kept.mean()), error, h - 1, n=n)


def paired_difference(a: ArrayLike, b: ArrayLike) -> Interval:
    """Mean of a - b, (n,) each and matched by seed, with the interval of scipy.stats.ttest_rel."""
    return mean(_differences(a, b))


def stratified_difference(strata: Sequence[tuple[ArrayLike, ArrayLike]]) -> Interval:
    """Mean over K data sets of the mean paired difference; every data set has the same weight.

    strata: one (a, b) per data set, matched by seed within it; n may differ between data sets.
    d = sum_k d_k / K, error = sqrt(sum_k v_k) / K with v_k = s_k^2 / n_k, and a t interval with
    (sum v)^2 / sum(v_k^2 / (n_k - 1)) degrees of freedom (Welch 1947, Satterthwaite 1946).
    No estimate if a data set has no pair, no bounds if one has a single pair. The interval says
    nothing about other data sets.
    """
    differences = [_differences(a, b) for a, b in strata]
    counts = np.array([len(d) for d in differences], dtype=np.intp)
    n = int(counts.sum())
    if n == 0 or counts.min() == 0:
        return Interval(None, None, None, LEVEL, n)
    estimate = float(np.mean([d.mean() for d in differences]))
    if counts.min() == 1:
        return Interval(estimate, None, None, LEVEL, n)
    variances = np.array([d.var(ddof=1) for d in differences]) / counts
    total = float(variances.sum())
    shares = variances / total if total else np.full(len(counts), 1 / len(counts))
    df = 1 / float((shares**2 / (counts - 1)).sum())
    return t_interval(estimate, math.sqrt(total) / len(counts), df, n=n)


def paired_improvement(a: ArrayLike, b: ArrayLike, *, higher_is_better: bool) -> Interval:
    """P(A beats B under the same seed): the share of pairs that A wins; a tie counts 1/2.

    With w wins out of n, the bounds are Clopper and Pearson's (1934): the (1-level)/2 quantile of
    Beta(w, n-w+1) and the (1+level)/2 quantile of Beta(w+1, n-w). They never cover less than the
    level and, with few pairs, often more (n = 8, p = 1/2: .992). Wilson's interval would call 7
    wins of 8 a win, and be wrong in 7 % of ties. Five pairs can never exclude 1/2 at 95 %. One pair
    has no bounds.
    """
    differences = _differences(a, b) if higher_is_better else _differences(b, a)
    n = len(differences)
    if n == 0:
        return Interval(None, None, None, LEVEL, 0)
    wins = float((differences > 0).sum() + 0.5 * (differences == 0).sum())
    if n == 1:
        return Interval(wins, None, None, LEVEL, 1)
    tail = (1 - LEVEL) / 2
    low = float(betaincinv(wins, n - wins + 1, tail)) if wins > 0 else 0.0
    high = float(betaincinv(wins + 1, n - wins, 1 - tail)) if wins < n else 1.0
    return Interval(wins / n, low, high, LEVEL, n)


def t_interval(estimate: float, standard_error: float, df: float, *, n: int) -> Interval:
    """estimate -+ t(df, (1 + level) / 2) * standard_error; no bounds if df < 1.

    Equal values give an interval of width 0, but no bounds while n values of one sign could be
    chance, 2 / 2^n > 1 - level (n <= 5 at 95 %): an accuracy is a count, so two or three seeds
    sometimes agree to the last digit. Differences that are all zero keep their interval, because
    they mostly come from identical runs.
    """
    has_no_spread = standard_error <= ROUNDING * abs(estimate)
    if df < 1 or (estimate and has_no_spread and 2 / 2**n > 1 - LEVEL):
        return Interval(estimate, None, None, LEVEL, n)
    half_width = float(stdtrit(df, (1 + LEVEL) / 2)) * standard_error if standard_error else 0.0
    return Interval(estimate, estimate - half_width, estimate + half_width, LEVEL, n, df)


def p_value(interval: Interval) -> float:
    """Two-sided p of "the mean is 0" for a t interval; 1 without bounds.

    p = 2 P(T > |estimate| / se) with the interval's degrees of freedom, so p < 1 - level exactly if
    the interval excludes 0.
    """
    if interval.estimate is None or interval.low is None or interval.high is None:
        return 1.0
    half_width = (interval.high - interval.low) / 2
    if half_width == 0:
        return 1.0 if interval.estimate == 0 else 0.0
    if interval.df is None:
        raise ValueError("only a t interval has the p value of a t test")
    t = abs(interval.estimate) / half_width * float(stdtrit(interval.df, (1 + interval.level) / 2))
    return float(2 * stdtr(interval.df, -t))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p of each comparison of a family: max over j <= i of min(1, (k - j) p_(j)), j >= 0.

    Rejecting if the adjusted p is at most alpha keeps the probability of any false rejection in the
    family at alpha, whatever the dependence (Holm 1979, "A simple sequentially rejective multiple
    test procedure"). The family is every declared comparison: leaving out the uninteresting ones
    afterwards breaks the promise.
    """
    sample = as_sample(list(p_values.values()))
    if ((sample < 0) | (sample > 1)).any():
        raise ValueError("a p value lies outside 0..1")
    order = np.argsort(sample, kind="stable")
    factors = np.arange(len(sample), 0, -1)
    adjusted = np.empty_like(sample)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * sample[order]), 1.0)
    return dict(zip(p_values, adjusted.tolist(), strict=True))


def as_sample(values: ArrayLike) -> Array:
    """Values as (n,) float64.

    Raises:
        ValueError: another shape, NaN or infinity: callers leave missing seeds out and report them.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1:
        raise ValueError(f"values have shape {sample.shape}; a sample is one-dimensional")
    if not np.isfinite(sample).all():
        raise ValueError("values hold NaN or infinity; leave missing seeds out and report them")
    return sample


def _differences(a: ArrayLike, b: ArrayLike) -> Array:
    first, second = as_sample(a), as_sample(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values; pair them by seed first")
    return first - second


def _median_coverage(k: int, n: int) -> float:
    """Probability that [x(k), x(n+1-k)] covers the median of a continuous distribution."""
    return 1 - 2 * float(bdtr(k - 1, n, 0.5))
