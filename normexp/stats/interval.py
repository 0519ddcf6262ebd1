"""What every statistic returns: an estimate with its bounds, or without them where none are due."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import root_scalar
from scipy.special import bdtr, betaincinv, ndtri, stdtrit

Array = NDArray[np.float64]
ROUNDING = 1e-9  # relative; a spread below it is that of the last digits of floats


@dataclass(frozen=True)
class Interval:
    """An estimate, its confidence interval, and how many values stand behind it.

    estimate: in the unit of the values; None where there is nothing to estimate from
    low, high: the bounds, both None where n is too small to give any
    level: nominal coverage in (0, 1)
    n: number of values (seeds, or pairs of seeds) used, after missing ones were left out
    method: how the bounds were computed, for a caption
    df: degrees of freedom of a t interval; None where it is none
    """

    estimate: float | None
    low: float | None
    high: float | None
    level: float
    n: int
    method: str
    df: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise ValueError(f"level={self.level} is no probability; try level=0.95")
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has both bounds or neither")


def as_sample(values: ArrayLike) -> Array:
    """Values as (n,) float64. NaN raises: the caller leaves missing values out and reports them."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1:
        raise ValueError(f"values have shape {sample.shape}; a sample is one-dimensional")
    if not np.isfinite(sample).all():
        raise ValueError("values hold NaN or infinity; leave missing seeds out and report them")
    return sample


def t_interval(
    estimate: float, standard_error: float, df: float, *, level: float, n: int, method: str
) -> Interval:
    """estimate -+ t(df, (1 + level) / 2) * standard_error; no bounds where df < 1.

    Values without any spread give an interval of width 0, as the formula says, but no bounds where
    n values of one sign could be chance, 2 / 2^n > 1 - level (n <= 5 at 95 %): an accuracy is a
    count, so that two or three seeds now and then agree to the digit. All zero stays certain: such
    differences are mostly of runs that are the same.
    """
    without_spread = standard_error <= ROUNDING * abs(estimate)
    if df < 1 or (estimate and without_spread and 2 / 2**n > 1 - level):
        return Interval(estimate, None, None, level, n, method)
    half_width = float(stdtrit(df, (1 + level) / 2)) * standard_error if standard_error else 0.0
    low, high = estimate - half_width, estimate + half_width
    return Interval(estimate, low, high, level, n, method, df)


# An exact median interval may fall short of the level by this much (n = 5: .9375 for .95); it then
# carries the level that it has. Further below, no bounds are given.
LEVEL_SHORTFALL = 0.02


def mean(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Mean of values (n,) with Student's t interval: mean -+ t(n-1) * s / sqrt(n).

    One value has no bounds, nor have a few that are all alike, see `t_interval`; none has no
    estimate.
    """
    sample = as_sample(values)
    n = len(sample)
    if n == 0:
        return Interval(None, None, None, level, 0, "t")
    error = float(sample.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return t_interval(float(sample.mean()), error, n - 1, level=level, n=n, method="t")


def median(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Median of values (n,) with an interval from order statistics, whatever the distribution.

    [x(k), x(n+1-k)] covers the median with probability c(k) = 1 - 2 P(Bin(n, 1/2) <= k - 1). With
    the largest k where c(k) >= level, the bounds are moved inwards to
    (1-w) x(k) + w x(k+1), likewise above, with f = (c(k) - level) / (c(k) - c(k+1)) and
    w = (n-k) f / (k + (n-2k) f)
    (Hettmansperger and Sheather 1986, "Confidence intervals based on interpolated order
    statistics"). No bounds where even [x(1), x(n)] misses the level by more than LEVEL_SHORTFALL:
    n <= 4 at 95 %. Where it misses by less, the interval states its true level.
    """
    sample = np.sort(as_sample(values))
    n = len(sample)
    method = "order statistics"
    if n == 0:
        return Interval(None, None, None, level, 0, method)
    centre = float(np.median(sample))
    widest = _coverage(1, n)
    if n == 1 or widest < level - LEVEL_SHORTFALL:
        return Interval(centre, None, None, level, n, method)
    if widest < level:
        return Interval(centre, float(sample[0]), float(sample[-1]), widest, n, method)
    k = max(k for k in range(1, n // 2 + 1) if _coverage(k, n) >= level)
    outer, inner = _coverage(k, n), max(_coverage(k + 1, n), 0.0)
    f = (outer - level) / (outer - inner)
    # Between the two middle values there is no inner interval to move towards.
    w = (n - k) * f / (k + (n - 2 * k) * f) if 2 * k < n else 0.0
    low = (1 - w) * sample[k - 1] + w * sample[k]
    high = (1 - w) * sample[n - k] + w * sample[n - k - 1]
    return Interval(centre, float(low), float(high), level, n, method)


def iqm(values: ArrayLike, *, level: float = 0.95) -> Interval:
    """Interquartile mean of values (n,): the mean without the g = floor(n / 4) least and greatest.

    The estimate is scipy.stats.trim_mean(values, 0.25) and rliable's aggregate_iqm (Agarwal et al.
    2021, arXiv:2108.13264). The interval is iqm -+ t(h-1) * sqrt(W / (h (h-1))) with h = n - 2g
    and W the sum of squared deviations of the values after the trimmed ones are replaced by their
    nearest kept neighbour (Tukey and McLaughlin 1963; in this form Yuen 1974). Below n = 4 nothing
    is trimmed and this is the mean's interval.
    """
    sample = np.sort(as_sample(values))
    n = len(sample)
    method = "t of trimmed mean"
    if n == 0:
        return Interval(None, None, None, level, 0, method)
    g = n // 4
    kept = sample[g : n - g]
    h = len(kept)
    winsorized = np.clip(sample, kept[0], kept[-1])
    squares = float(((winsorized - winsorized.mean()) ** 2).sum())
    error = math.sqrt(squares / (h * (h - 1))) if h > 1 else 0.0
    return t_interval(float(kept.mean()), error, h - 1, level=level, n=n, method=method)


def _coverage(k: int, n: int) -> float:
    """Probability that [x(k), x(n+1-k)] covers the median of a continuous distribution."""
    return 1 - 2 * float(bdtr(k - 1, n, 0.5))


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


def probability_of_improvement(
    a: ArrayLike, b: ArrayLike, *, higher_is_better: bool, level: float = 0.95
) -> Interval:
    """P(a run of A beats a run of B) over all pairs of a (m,) and b (n,); a tie counts 1/2.

    The estimate is the Mann-Whitney U / (m n), rliable's probability_of_improvement. The bounds are
    the p with |estimate - p| = z sd(p), where
    sd(p)^2 = p (1-p) / (m n) * [1 + ((m+n)/2 - 1) ((1-p)/(2-p) + p/(1+p))]
    (Newcombe 2006, "Confidence intervals for an effect size measure based on the Mann-Whitney
    statistic", method 5): a score interval, so it stays sensible where the samples separate.
    m and n need not match: `n` of the result is the smaller. No bounds where even separated samples
    would not be rare, 2 / C(m+n, m) > 1 - level: fewer than 4 against 4, or 3 against 5, at 95 %.

    Coverage of 95 %, 40,000 or more simulations of normal values, p from .5 to .9: .945 to .966 at
    m = n = 5, .949 to .966 at 8, .950 to .968 at 20; from .938 to .976 beyond .9. With sd 1
    against 3 it is .928 to .961, and as low as .908 beyond .9. A logit interval with DeLong's
    variance ranged from .73 to .999 (20,000 simulations). Seeds that A and B
    share make the runs alike and the interval wider than it need be.
    """
    method = "Newcombe score"
    first, second = as_sample(a), as_sample(b)
    m, n = len(first), len(second)
    fewer = min(m, n)
    if fewer == 0:
        return Interval(None, None, None, level, 0, method)
    gaps = first[:, None] - second
    p = float(((gaps > 0) + 0.5 * (gaps == 0)).mean())
    if not higher_is_better:
        p = 1 - p
    if 2 / math.comb(m + n, m) > 1 - level:
        return Interval(p, None, None, level, fewer, method)
    z = float(ndtri((1 + level) / 2))
    low, high = _score_bound(p, m, n, z), 1 - _score_bound(1 - p, m, n, z)
    return Interval(p, low, high, level, fewer, method)


def paired_improvement(
    a: ArrayLike, b: ArrayLike, *, higher_is_better: bool, level: float = 0.95
) -> Interval:
    """P(A beats B under the same seed): the share of pairs that A wins; a tie counts 1/2.

    With w wins out of n, the bounds are Clopper and Pearson's (1934): the (1-level)/2 quantile of
    Beta(w, n-w+1) and the (1+level)/2 quantile of Beta(w+1, n-w). They never cover less than the
    level, ties only make them safer. Shares of n pairs are coarse, so they often cover more (n = 8,
    p = 1/2: .992); Wilson's interval would call 7 wins of 8 a win, and be wrong in 7 % of ties.
    n = 5 pairs never suffice to exclude 1/2 at 95 %. One pair has no bounds.
    """
    method = "Clopper-Pearson"
    first, second = as_sample(a), as_sample(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values; pair them by seed first")
    n = len(first)
    if n == 0:
        return Interval(None, None, None, level, 0, method)
    better = first > second if higher_is_better else first < second
    wins = float(better.sum() + 0.5 * (first == second).sum())
    if n == 1:
        return Interval(wins, None, None, level, 1, method)
    tail = (1 - level) / 2
    low = float(betaincinv(wins, n - wins + 1, tail)) if wins > 0 else 0.0
    high = float(betaincinv(wins + 1, n - wins, 1 - tail)) if wins < n else 1.0
    return Interval(wins / n, low, high, level, n, method)


def _score_bound(estimate: float, m: int, n: int, z: float) -> float:
    """The p below the estimate that lies z standard deviations away from it."""
    if estimate == 0:
        return 0.0

    def excess(p: float) -> float:
        spread = (1 - p) / (2 - p) + p / (1 + p)
        variance = p * (1 - p) * (1 + ((m + n) / 2 - 1) * spread) / (m * n)
        return (estimate - p) ** 2 - z**2 * variance

    # p = 1 is a second root of an estimate of 1, so the bracket ends just below the estimate.
    return float(root_scalar(excess, bracket=(0.0, estimate - 1e-9), method="brentq").root)


@dataclass(frozen=True)
class Judgement:
    """One comparison of a family: its p, the p after Holm's correction, and rejected or not."""

    p_value: float
    adjusted_p_value: float
    rejected: bool


def holm(p_values: ArrayLike) -> Array:
    """Adjusted p of each of (k,) p values: max over j <= i of min(1, (k - j) p_(j)), j from 0.

    Rejecting where the adjusted p is at most alpha keeps the probability of any false rejection in
    the family at alpha, whatever the dependence (Holm 1979, "A simple sequentially rejective
    multiple test procedure").
    """
    sample = as_sample(p_values)
    if ((sample < 0) | (sample > 1)).any():
        raise ValueError("a p value lies outside 0..1")
    order = np.argsort(sample, kind="stable")
    factors = np.arange(len(sample), 0, -1)
    adjusted = np.empty_like(sample)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * sample[order]), 1.0)
    return adjusted


def judge_family(p_values: Mapping[str, float], *, alpha: float = 0.05) -> dict[str, Judgement]:
    """Which comparisons of the family are rejected when any false one may occur with alpha.

    p_values: every declared comparison by name, also those that turned out dull: leaving some out
    afterwards breaks the promise.
    """
    adjusted = holm(list(p_values.values()))
    return {
        name: Judgement(p, float(q), bool(q <= alpha))
        for (name, p), q in zip(p_values.items(), adjusted, strict=True)
    }


def largest_family(num_pairs: int, *, alpha: float = 0.05) -> int:
    """How many comparisons leave Holm able to reject with the least sign-flip p, 2 / 2^num_pairs.

    8 pairs: 6 comparisons; 5 pairs: none.
    """
    return int(alpha * 2 ** (num_pairs - 1))
