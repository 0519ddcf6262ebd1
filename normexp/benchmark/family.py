"""One family of verdicts with one error rate, and the number of seeds that a verdict takes.

A member is a difference d with a t interval, between two norms, two sizes or two budgets. Three
sentences are possible: d > 0, d < 0, and |d| < margin ("holds its level", "does not change"). If
each test is made at level a, a false sentence is said with probability at most a, whatever the true
d:

- d = 0: only the two directions are false; a two-sided test at level a says one of them.
- 0 < |d| < margin: only the wrong direction is false, probability a / 2.
- |d| >= margin: "within" and the wrong direction are false. Both need the upper (lower) one-sided
  bound of level 1 - a to be on the wrong side of the margin, so together they have probability a.

So a difference and an equivalence may both be tested at level a, without a correction for doing
both (Goeman, Solari and Stijnen 2010, "Three-sided hypothesis testing"; equivalence by Schuirmann's
1987 two one-sided tests). Over m members a = 5 % / m keeps the probability of any false sentence in
the report at 5 %, however the members depend on each other (Bonferroni). Holm's steps down would be
wrong here: a member whose difference is shown may still have a false "within" or a false direction,
so by the closure principle it never leaves the family. m counts the members that were declared, not
those that have results so far.

A margin may be estimated, such as a quarter of the reference's error. Then "within" is that every
distance from d to a margin is positive, each shown by its own one-sided test at level a, with the
noise of the reference inside (intersection-union test, Berger 1982: no correction for their
number). See normexp.benchmark.contrast.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from scipy.special import nctdtrinc, stdtr, stdtrit

from normexp.stats.interval import Interval

ALPHA = 0.05  # probability of any false verdict in a report
POWER = 0.8
MAX_SEEDS = 1000

Verdict = Literal["above", "below", "within", "open"]


def decide(gap: Interval, *, distances: Sequence[Interval], family_size: int) -> Verdict:
    """The verdict on one member; `open` if undecided or without bounds.

    A difference takes precedence over `within`. A family of one tests `within` at half the level,
    so that the 95 % interval lies within the margin too.

    distances: from the gap to each margin, positive within; see `distances_to`
    """
    if gap.estimate is None:
        return "open"
    if family_size * p_value(gap) <= ALPHA:
        return "above" if gap.estimate > 0 else "below"
    is_within = max(family_size, 2) * equivalence_p(distances) <= ALPHA
    return "within" if is_within else "open"


def distances_to(margin: float, gap: Interval) -> list[Interval]:
    """margin - gap and margin + gap, for a margin that is a constant."""
    if gap.estimate is None:
        return []
    # The bounds and p of a shifted mean differ from those of the mean by the shift alone.
    return [_shifted(-gap, margin), _shifted(gap, margin)]


def p_value(interval: Interval) -> float:
    """Two-sided p of "the mean is 0" for a t interval; 1 without bounds."""
    if interval.estimate is None or interval.low is None:
        return 1.0
    return max(
        float(2 * stdtr(df, -abs(interval.estimate) / error)) for df, error in _t_of(interval)
    )


def equivalence_p(distances: Sequence[Interval]) -> float:
    """p of "not all of these means are positive", by one-sided t tests; 1 without bounds."""
    return max((_p_of_positive(distance) for distance in distances), default=1.0)


def _p_of_positive(interval: Interval) -> float:
    if interval.estimate is None or interval.low is None:
        return 1.0
    return max(float(stdtr(df, -interval.estimate / error)) for df, error in _t_of(interval))


def spread_of(gap: Interval) -> tuple[float, float] | None:
    """The standard deviation over seeds, and the standard error that test samples add to a mean.

    None without bounds.
    """
    if gap.error is None or gap.df is None:
        return None
    _, error = gap.over_seeds or (gap.df, gap.error)
    return math.sqrt(gap.n) * error, math.sqrt(max(0.0, gap.error**2 - error**2))


def smallest_difference(n: int, sd: float, family_size: int, of_samples: float = 0.0) -> float:
    """Smallest true difference that n pairs with standard deviation `sd` show in 80 % of studies.

    Infinite for n < 2.

    of_samples: standard error that the test samples add; more seeds do not lower it
    """
    if n < 2:
        return math.inf
    critical = stdtrit(n - 1, 1 - ALPHA / (2 * family_size))
    error = math.hypot(sd / math.sqrt(n), of_samples)
    return float(nctdtrinc(n - 1, 1 - POWER, critical)) * error


def seeds_for(
    difference: float, sd: float, family_size: int, of_samples: float = 0.0
) -> int | None:
    """Fewest pairs of seeds that show the difference in 80 % of studies; None above MAX_SEEDS."""

    def is_enough(n: int) -> bool:  # then more are, too
        return smallest_difference(n, sd, family_size, of_samples) <= difference

    n = 2 + bisect_left(range(2, MAX_SEEDS + 1), True, key=is_enough)
    return n if n <= MAX_SEEDS else None


def seeds_to_decide(
    gap: Interval, margin: float, family_size: int, *, any_samples: bool = False
) -> int | None:
    """Fewest seeds with which a new study would decide a difference as large as this one.

    It decides in 80 % of studies: that there is a difference, or that it is within the margin,
    whichever takes fewer seeds. The spread over seeds is that of this gap; the share of its error
    that comes from the test samples stays as it is. None: more than MAX_SEEDS, on these samples.

    any_samples: as if there were any number of test samples
    """
    spread = spread_of(gap)
    if gap.estimate is None or spread is None:
        return None
    target = max(abs(gap.estimate), margin - abs(gap.estimate))
    return seeds_for(target, spread[0], family_size, 0.0 if any_samples else spread[1])


def _t_of(interval: Interval) -> list[tuple[float, float]]:
    """Degrees of freedom and standard error of each t test that a verdict must pass."""
    if interval.df is None or interval.error is None:
        raise ValueError("only a t interval has the p value of a t test")
    alone = [] if interval.over_seeds is None else [interval.over_seeds]
    return [(interval.df, interval.error), *alone]


def _shifted(interval: Interval, shift: float) -> Interval:
    estimate, low, high = (
        None if value is None else value + shift
        for value in (interval.estimate, interval.low, interval.high)
    )
    return replace(interval, estimate=estimate, low=low, high=high)
