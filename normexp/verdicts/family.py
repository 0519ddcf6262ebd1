"""One family of verdicts with one error rate.

A member is a difference d with a t interval, between two arms or two sizes. Three verdicts are
possible: d > 0, d < 0, and |d| < margin (a tie). If each test is made at level a, a false verdict
is given with probability at most a, whatever the true d:

- d = 0: only the two directions are false; a two-sided test at level a says one of them.
- 0 < |d| < margin: only the wrong direction is false, probability a / 2.
- |d| >= margin: a tie and the wrong direction are false. Both need the upper (lower) one-sided
  bound of level 1 - a to be on the wrong side of the margin, so together they have probability a.

So a difference and an equivalence may both be tested at level a, without a correction for doing
both (Goeman, Solari and Stijnen 2010, "Three-sided hypothesis testing"; equivalence by Schuirmann's
1987 two one-sided tests). Over m members a = 5 % / m keeps the probability of any false verdict in
the family at 5 %, however the members depend on each other (Bonferroni). Holm's steps down would be
wrong here: a member whose difference is shown may still have a false tie or a false direction, so
by the closure principle it never leaves the family.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

from normexp.verdicts.interval import Interval, crossed_mean, cut, welch_mean

ALPHA = 0.05  # probability of any false verdict in a family
# A tie: at most, on each side. 0.025 puts the 95 % interval within the margin.
TIE_ALPHA = 0.025

Verdict = Literal["better", "worse", "tie", "undecided"]


def difference(
    *arms: ArrayLike,
    step: float | None = None,
    limit: float = math.inf,
    drift: float | None = None,
) -> Interval:
    """The mean of the first arm minus that of the second, whose seeds are not paired.

    arms: (n,), or (n, N) with the same N test samples: then the interval is for new seeds and new
        samples. Both may have other numbers of seeds. One alone: differences that are paired
    step: of a seed's value; see normexp.verdicts.interval
    limit: the largest possible difference, at which the bounds are cut
    drift: along the test text, if the test samples are its sequences; see normexp.verdicts.waves
    """
    outcomes = [np.asarray(arm, dtype=np.float64) for arm in arms]
    if len({of_arm.shape[1:] for of_arm in outcomes}) > 1:
        shapes = " and ".join(str(of_arm.shape) for of_arm in outcomes)
        raise ValueError(f"shapes {shapes}; the test samples must be the same")
    if outcomes[0].ndim == 1:
        return cut(welch_mean(*outcomes, step=step), limit)
    return crossed_mean(*outcomes, step=step, limit=limit, drift=drift)


def decide(gap: Interval, *, margin: float, family_size: int, alpha: float = ALPHA) -> Verdict:
    """The verdict on one member; `undecided` without bounds.

    A difference takes precedence over a tie.

    alpha: probability of any false verdict in the family
    """
    if gap.estimate is None or gap.low is None:
        return "undecided"
    if family_size * p_value(gap) <= alpha:
        return "better" if gap.estimate > 0 else "worse"
    is_tie = tie_p(gap, margin) <= min(TIE_ALPHA, alpha / family_size)
    return "tie" if is_tie else "undecided"


def least_decided(gap: Interval, *, family_size: int, alpha: float = ALPHA) -> float | None:
    """The smallest difference that would be decided with the same spread; None without bounds."""
    if gap.estimate is None or gap.low is None:
        return None
    return half_width(gap, alpha / (2 * family_size))


def half_width(gap: Interval, tail: float) -> float:
    """Of an interval with bounds, at another level. tail: the probability on each side"""
    return max(float(stdtrit(df, 1 - tail)) * error for df, error in gap.t_tests)


def p_value(gap: Interval) -> float:
    """Two-sided p of "the mean is 0" for a t interval; 1 without bounds."""
    if gap.estimate is None or gap.low is None:
        return 1.0
    return max(float(2 * stdtr(df, -abs(gap.estimate) / error)) for df, error in gap.t_tests)


def tie_p(gap: Interval, margin: float) -> float:
    """p of "the mean is not within the margin", by two one-sided t tests; 1 without bounds."""
    if gap.estimate is None or gap.low is None or not math.isfinite(margin):
        return 1.0
    distance = margin - abs(gap.estimate)
    return max(float(stdtr(df, -distance / error)) for df, error in gap.t_tests)
