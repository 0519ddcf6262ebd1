"""Numbers as text: as many digits as their interval deserves."""

from __future__ import annotations

import math
from dataclasses import replace

from normexp.stats import Interval

MOST_DIGITS = 4


def format_interval(interval: Interval, digits: int) -> str:
    """`1.2 [0.6, 1.9]`; the estimate alone where no interval is due, `-` where there is nothing."""
    if interval.estimate is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.estimate:.{digits}f}"
    shown = _digits_of(interval.low, interval.high, digits)
    estimate, low, high = (
        f"{x:.{shown}f}" for x in (interval.estimate, interval.low, interval.high)
    )
    return f"{_positive_zero(estimate)} [{_positive_zero(low)}, {_positive_zero(high)}]"


def format_signed(value: float, digits: int) -> str:
    """With its sign; `+0.0` also for what rounds to it from below."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def negated(interval: Interval) -> Interval:
    """The interval of the opposite sign."""
    if interval.estimate is None:
        return interval
    low = None if interval.high is None else -interval.high
    high = None if interval.low is None else -interval.low
    return replace(interval, estimate=-interval.estimate, low=low, high=high)


def p_value_of(interval: Interval) -> float:
    """Two-sided p of "the mean is 0" that belongs to a t interval.

    p = 2 P(T > |estimate| / se) with the interval's degrees of freedom: p < 1 - level exactly where
    the interval leaves 0 out, so that words from either agree. 1 where there is no interval.
    """
    from scipy.special import stdtr, stdtrit

    if interval.estimate is None or interval.low is None or interval.high is None:
        return 1.0
    half_width = (interval.high - interval.low) / 2
    if half_width == 0:
        return 1.0 if interval.estimate == 0 else 0.0
    if interval.df is None:
        raise ValueError(f"an interval by {interval.method} has no p of a t test")
    t = abs(interval.estimate) / half_width * float(stdtrit(interval.df, (1 + interval.level) / 2))
    return float(2 * stdtr(interval.df, -t))


def _digits_of(low: float, high: float, digits: int) -> int:
    """Enough for the half width, and enough that a bound off 0 is not shown as 0."""
    half_width = (high - low) / 2
    has_width = half_width > 1e-9 * max(abs(low), abs(high))  # else the last bits of a float
    wanted = max(digits, math.ceil(-math.log10(half_width))) if has_width else digits
    excludes_zero = low > 0 or high < 0
    nearest = min(abs(low), abs(high))
    while excludes_zero and wanted < MOST_DIGITS and round(nearest, wanted) == 0:
        wanted += 1
    return min(wanted, MOST_DIGITS)


def _positive_zero(text: str) -> str:
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text
