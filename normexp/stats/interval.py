"""What every statistic returns: an estimate with its bounds, or without them where none are due."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

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
