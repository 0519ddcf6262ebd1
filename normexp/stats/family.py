"""One family of verdicts with one error rate, and the number of seeds that a verdict takes.

A member is a difference d with a t interval. Three sentences are possible: d > 0, d < 0, and
|d| < margin ("holds its level"). If each test is made at level a, a false sentence is said with
probability at most a, whatever the true d:

- d = 0: only the two directions are false; a two-sided test at level a says one of them.
- 0 < |d| < margin: only the wrong direction is false, probability a / 2.
- |d| >= margin: "within" and the wrong direction are false. Both need the upper (lower) one-sided
  bound of level 1 - a to be on the wrong side of the margin, so together they have probability a.

So a difference and an equivalence may both be tested at level a, without a correction for doing
both (Goeman, Solari and Stijnen 2010, "Three-sided hypothesis testing"; equivalence by Schuirmann's
1987 two one-sided tests). Over m members a = 5 % / m keeps the probability of any false sentence in
the report at 5 %, however the members depend on each other (Bonferroni). Holm's steps down would be
wrong here: a member whose difference is shown may still have a false "within" or a false direction,
so by the closure principle it never leaves the family.
"""

from __future__ import annotations

import math
from typing import Literal

from scipy.special import nctdtrinc, stdtr, stdtrit

from normexp.stats.interval import Interval

ALPHA = 0.05  # probability of any false verdict in a report
POWER = 0.8
MAX_SEEDS = 1000

Verdict = Literal["above", "below", "within", "open"]


def decide(interval: Interval, *, margin: float, family_size: int) -> Verdict:
    """The verdict on one member; `open` if undecided or without bounds.

    A difference takes precedence over `within`. A family of one tests `within` at half the level,
    so that the 95 % interval lies within the margin too.
    """
    if interval.estimate is None:
        return "open"
    if family_size * p_value(interval) <= ALPHA:
        return "above" if interval.estimate > 0 else "below"
    is_within = max(family_size, 2) * equivalence_p(interval, margin) <= ALPHA
    return "within" if is_within else "open"


def p_value(interval: Interval) -> float:
    """Two-sided p of "the mean is 0" for a t interval; 1 without bounds."""
    if interval.estimate is None or interval.low is None:
        return 1.0
    df, error = _t_of(interval)
    return float(2 * stdtr(df, -abs(interval.estimate) / error))


def equivalence_p(interval: Interval, margin: float) -> float:
    """p of "the mean is not within -+ margin" by two one-sided t tests; 1 without bounds."""
    if interval.estimate is None or interval.low is None:
        return 1.0
    df, error = _t_of(interval)
    return float(stdtr(df, -(margin - abs(interval.estimate)) / error))


def smallest_difference(n: int, sd: float, family_size: int) -> float:
    """Smallest true difference that n pairs with standard deviation `sd` show in 80 % of studies.

    Infinite for n < 2.
    """
    if n < 2:
        return math.inf
    critical = stdtrit(n - 1, 1 - ALPHA / (2 * family_size))
    return float(nctdtrinc(n - 1, 1 - POWER, critical)) * sd / math.sqrt(n)


def seeds_for(difference: float, sd: float, family_size: int) -> int | None:
    """Fewest pairs of seeds that show the difference in 80 % of studies; None above MAX_SEEDS."""
    needed = (
        n for n in range(2, MAX_SEEDS + 1) if smallest_difference(n, sd, family_size) <= difference
    )
    return next(needed, None)


def _t_of(interval: Interval) -> tuple[float, float]:
    if interval.df is None or interval.error is None:
        raise ValueError("only a t interval has the p value of a t test")
    return interval.df, interval.error
