"""Estimates with confidence intervals for a handful of seeds, as pure functions on arrays.

Every function takes values over seeds, (num_runs,), and returns an `Interval`. Where the values
allow no interval, both bounds are None.

**Equal values are not certainty.** An accuracy is a count divided by the size of the test set, so a
few seeds may agree to the last digit. Where values repeat, one squared `step` is added to the sum
of squared deviations: the smallest difference that values could have (`smallest_step`). For n equal
values the half width is then close to the rule of three, 1 - 0.05^(1/n) steps.
Equal values without a known step have no bounds, so no interval has width 0.

**Bounded values.** Within `bounds`, a t interval is built for arcsin(sqrt(p)), where p is the share
of the range, by the delta method, and transformed back, so no bound leaves the range (Anscombe
1948, "The transformation of Poisson, binomial and negative-binomial data"). In the middle of the
range this is the t interval; near an end, where t covers too little, the interval is skewed as the
values are. An interval of a difference is cut at the largest possible difference. Coverage: see
tests/verdicts/test_stats_coverage.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from normexp.verdicts.waves import over_sequences, residuals_of, waves_of, why_unknown

Array = NDArray[np.float64]
Bounds = tuple[float, float]
ROUNDING = 1e-9  # a deviation below this share of the values is floating-point noise
LEVEL = 0.95  # the nominal coverage of every interval


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    estimate: in the unit of the values; None if there are none
    low, high: the bounds; both None if the values allow none
    n: number of values (seeds, or pairs of seeds)
    df, error: degrees of freedom and standard error of a t interval; None for other intervals
    further: (df, error) of further t intervals, such as that over seeds alone of an interval over
        new test samples too, which is narrower than none of them at any level
    why: why there are no bounds, unless too few seeds are the reason
    """

    estimate: float | None
    low: float | None
    high: float | None
    n: int
    df: float | None = None
    error: float | None = None
    further: tuple[tuple[float, float], ...] = ()
    why: str = ""

    @property
    def t_tests(self) -> list[tuple[float, float]]:
        """Degrees of freedom and standard error of each t test that a verdict must pass."""
        if self.df is None or self.error is None:
            raise ValueError("only a t interval has the p value of a t test")
        return [(self.df, self.error), *self.further]


def smallest_step(values: ArrayLike) -> float:
    """Smallest positive gap between any two of the finite values if some are equal; otherwise 0.

    Pass all values of the metric on one test set: the more values, the closer the gap comes to one
    test sample. It is 0 for values that do not repeat, such as losses, and if all are equal.
    """
    sample = np.asarray(values, dtype=np.float64).ravel()
    sample = np.sort(sample[np.isfinite(sample)])
    gaps = np.diff(sample)
    is_positive = gaps > ROUNDING * np.abs(sample).max(initial=0.0)
    return float(gaps[is_positive].min()) if is_positive.any() and not is_positive.all() else 0.0


def mean(
    values: ArrayLike,
    *,
    step: float | None = None,
    bounds: Bounds | None = None,
) -> Interval:
    """Mean of values (n,) with Student's t interval of n - 1 degrees of freedom.

    step: see the top of this file; by default `smallest_step(values)`
    bounds: range of the values, which the interval does not leave

    Raises:
        ValueError: another shape, NaN or infinity: callers leave missing seeds out and report them.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1:
        raise ValueError(f"values have shape {sample.shape}; a sample is one-dimensional")
    if not np.isfinite(sample).all():
        raise ValueError("values hold NaN or infinity; leave missing seeds out and report them")
    n = len(sample)
    if n == 0:
        return Interval(None, None, None, 0)
    squares = float(((sample - sample.mean()) ** 2).sum())
    step = smallest_step(sample) if step is None else step
    error = math.sqrt((squares + step**2) / (n * (n - 1))) if n > 1 else 0.0
    return t_interval(float(sample.mean()), error, n - 1, n=n, bounds=bounds)


def welch_mean(*samples: Array, step: float | None = None) -> Interval:
    """The mean of the first sample (n,) minus that of a second (m,), by Welch's t interval.

    The variances may differ, and so may n and m (Welch 1947, "The generalization of Student's
    problem when several different population variances are involved"). Of one sample: `mean`.
    """
    n = min(map(len, samples))
    if n == 0:
        return Interval(None, None, None, 0)
    step = smallest_step(np.concatenate(samples)) if step is None else step
    means = [float(sample.mean()) for sample in samples]
    estimate = means[0] - sum(means[1:])
    if n < 2:
        return Interval(estimate, None, None, n)
    error, df = _pool([_over_seeds(sample, step) for sample in samples])
    return t_interval(estimate, error, df, n=n)


def _over_seeds(values: Array, step: float) -> tuple[float, float]:
    """The squared standard error of a mean over seeds, and its degrees of freedom."""
    n = len(values)
    deviations = values - values.mean()
    return float(deviations @ deviations + step**2) / (n * (n - 1)), n - 1


def _pool(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The standard error of a sum of independent parts, with Satterthwaite's degrees of freedom."""
    total = sum(variance for variance, _ in parts)
    spread = sum(variance**2 / df for variance, df in parts)
    return math.sqrt(total), total**2 / spread if spread else 0.0


def crossed_mean(
    *tables: ArrayLike,
    step: float | None = None,
    limit: float = math.inf,
    drift: float | None = None,
) -> Interval:
    """Mean of a table (n seeds, N test samples), over new seeds and new test samples.

    With a second table (m, N): the mean of the first minus that of the second. Their seeds are not
    paired, and their test samples are, since they are the same.

    Rows and columns are crossed random effects: with v_S and v_I the squared standard errors of the
    mean over seeds alone and over samples alone, and v_E that of the residuals, the squared
    standard error is v_S + v_I - v_E, here never less than v_S or v_I, with Satterthwaite's degrees
    of freedom (Cornfield and Tukey 1956, "Average values of mean squares in factorials";
    Satterthwaite 1946). Of two tables v_S and v_E are the sums of both, and v_I is that of the
    differences between their columns. The two-way bootstrap of Owen and Eckles (2012,
    "Bootstrapping data arrays of arbitrary order") estimates the same variance, v_E too large. At
    no level is the interval narrower than that over seeds alone.

    **Few samples decide.** Where K of N samples tell two networks apart, v_I is as uncertain as a
    count of K: its degrees of freedom are 2 N / (kurtosis - 1), about 2 K. And v_I is never less
    than that of two samples, one for each sign, on which every seed differs: even if none is among
    these N, up to 3.7 are to be expected (rule of three, 2.5 % a side). The half width for a table
    without any difference is 3.9 steps.

    step: of a mean over the samples, by default that of one sample; see the top of this file
    drift: along the test text, if the samples are its sequences, whose neighbours may be alike: see
        waves.py
    """
    crossed = [np.asarray(table, dtype=np.float64) for table in tables]
    n, num_samples = min(map(len, crossed)), crossed[0].shape[1]
    means = [float(table.mean()) for table in crossed if table.size]
    if len(means) < len(crossed):
        return Interval(None, None, None, n)
    estimate = means[0] - sum(means[1:])
    if n < 2 or num_samples < 2:
        return Interval(estimate, None, None, n)
    step = float(step or min(map(smallest_step, crossed)) / num_samples)
    seeds = [_over_seeds(table.mean(axis=1), step) for table in crossed]
    error_of_seeds, df_of_seeds = _pool(seeds)
    parts = crossed if drift is None else [waves_of(table) for table in crossed]
    columns = parts[0].mean(axis=0) - sum(part.mean(axis=0) for part in parts[1:])
    if drift is not None:
        if why := why_unknown(columns, num_samples, error_of_seeds**2, drift):
            return Interval(estimate, None, None, n, why=why)
        samples = over_sequences(columns)
        residuals = [residuals_of(part) for part in parts]
    else:
        samples = _over_samples(columns - estimate, step)
        residuals = [_residuals(part) for part in parts]
    of_seeds, of_samples, of_residuals = (
        sum(variance for variance, _ in of_one) for of_one in (seeds, [samples], residuals)
    )
    total = max(of_seeds + of_samples - of_residuals, of_seeds, of_samples)
    spread = sum(variance**2 / df for variance, df in (*seeds, samples, *residuals))
    least = min(df_of_seeds, samples[1])
    freedom = max(total**2 / spread, least) if spread else 0.0
    interval = t_interval(estimate, math.sqrt(total), freedom, n=n)
    over_seeds = t_interval(estimate, error_of_seeds, df_of_seeds, n=n)
    if interval.low is not None and over_seeds.low is not None:
        wider = interval if interval.low < over_seeds.low else over_seeds
        further = tuple(over_seeds.t_tests)
        interval = replace(interval, low=wider.low, high=wider.high, further=further)
    return cut(interval, limit)


def _over_samples(columns: Array, step: float) -> tuple[float, float]:
    """The squared standard error over samples, and its degrees of freedom.

    columns: deviations of the means of samples, (N,)
    """
    num_samples, squares = len(columns), columns @ columns
    # Effective number of samples that carry the squares; at least 2 are assumed.
    least = 2 * (step * num_samples) ** 2
    sharing = 2.0 if squares <= least else squares**2 / (columns**4).sum()
    variance = max(squares, least) / (num_samples * (num_samples - 1))
    df = 2 * sharing / max(1 - sharing / num_samples, 1 / num_samples)
    return float(variance), min(float(df), num_samples - 1)


def _residuals(table: Array) -> tuple[float, float]:
    """The squared standard error of the mean by residuals alone, and its degrees of freedom."""
    n, num_samples = table.shape
    rows = table.mean(axis=1) - table.mean()
    columns = table.mean(axis=0) - table.mean()
    squares = ((table - table.mean()) ** 2).sum()
    squares -= num_samples * (rows @ rows) + n * (columns @ columns)
    df = (n - 1) * (num_samples - 1)
    return max(float(squares), 0.0) / (df * n * num_samples), df


def t_interval(
    estimate: float,
    error: float,
    df: float,
    *,
    n: int,
    bounds: Bounds | None = None,
) -> Interval:
    """estimate -+ t(df, (1 + LEVEL) / 2) * error, on the arcsine scale within `bounds`.

    No bounds if df < 1 or the error is floating-point noise.
    """
    if df < 1 - ROUNDING or error <= ROUNDING * abs(estimate):
        return Interval(estimate, None, None, n)
    quantile = float(stdtrit(df, (1 + LEVEL) / 2))
    low, high = estimate - quantile * error, estimate + quantile * error
    if bounds is not None:
        least, width = bounds[0], bounds[1] - bounds[0]
        # A mean at an end moves inwards by half a step / n, which the error implies.
        margin = error / width * math.sqrt(df / (df + 1)) / 2
        share = min(max((estimate - least) / width, margin), 1 - margin)
        half = quantile * error / width / (2 * math.sqrt(share * (1 - share)))
        angle = math.asin(math.sqrt(share))
        ends = max(angle - half, 0.0), min(angle + half, math.pi / 2)
        low, high = (least + width * math.sin(end) ** 2 for end in ends)
    return Interval(estimate, low, high, n, df, error)


def cut(interval: Interval, limit: float) -> Interval:
    """The interval with its bounds cut at -limit and limit."""
    if interval.low is None or interval.high is None:
        return interval
    return replace(interval, low=max(interval.low, -limit), high=min(interval.high, limit))
