"""The outcome of "tune, then train", from a complete grid of candidates and seeds.

A candidate is a value of the tuned setting, such as a learning rate.

What is estimated: train every candidate with k seeds, choose the one with the best mean on
validation, train one fresh seed with it, and test it. The luck of the choice belongs to this
procedure, so it belongs in the interval. The estimate is the mean outcome over all splits of the
seeds into k that choose and n - k that report (Stone 1974, "Cross-validatory choice and
assessment"; Chernozhukov et al. 2018, "Double/debiased machine learning"). It is a U-statistic of
order k + 1, smooth although the choice of one split is not. The validation data are taken as given.

Its error comes from deleting seeds. theta(-j) is the same mean without seed j, again with k seeds
that choose, and the pseudo-value of seed j is n theta - (n - 1) theta(-j) (Tukey 1958). The mean of
the pseudo-values is theta, and their squared standard error is the jackknife's, on average no
smaller than the truth (Efron and Stein 1981). So pseudo-values replace the values of seeds wherever
a mean over seeds is wanted: `mean`, `crossed_mean`, differences between arms, between budgets.

Deleting one seed may not move a choice that other seeds would have moved: where a noisy candidate
is best by little, a low estimate has a small error, and at n = 16 only 90 % of intervals cover.
Deleting half of the seeds moves it (Shao and Wu 1989, "A general theory for jackknife variance
estimation"). The larger of the two errors counts: the deviations of the pseudo-values are scaled up
to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import ArrayLike

from normexp.verdicts.interval import Array

AT_EDGE = 0.25  # if more of the splits choose an end of the grid, a better value may lie outside
MAX_SPLITS = 13_000  # all splits up to n = 16; for more seeds as many are drawn
NUM_HALVES = 200  # halves of the seeds that are kept in turn; all of them up to n = 9
SPLITS_OF_HALF = 70  # splits of each half; all of them up to n = 17


@dataclass(frozen=True)
class CrossFit:
    """Outcomes of a tuned arm.

    values: pseudo-values over seeds, (n,) or (n, N) with test samples; see the top of this file
    shares: how often each candidate was chosen, (num_candidates,), sum 1
    """

    values: Array
    shares: Array


def cross_fit(scores: ArrayLike, outcomes: ArrayLike) -> CrossFit:
    """Cross-fitted outcomes of one arm from a complete grid.

    Arms are compared by the difference of their values: every arm with the same n has the same
    splits. Half of the seeds choose, k = n // 2. The first of equal candidates is chosen.

    scores: (num_candidates, n), by which one is chosen, on validation data; higher is better, and
        -inf for a diverged run: its candidate is chosen only where every candidate has one
    outcomes: (num_candidates, n), or (num_candidates, n, N) with test samples

    Raises:
        ValueError: fewer than 3 seeds, or a missing value.
    """
    chosen_by = np.asarray(scores, dtype=np.float64)
    reported = np.asarray(outcomes, dtype=np.float64)
    num_candidates, n = chosen_by.shape
    if n < 3:
        raise ValueError(f"{n} seeds: with two that report and one that chooses, it takes 3")
    is_missing = np.isnan(chosen_by).any() or not np.isfinite(reported).all()
    if reported.shape[:2] != chosen_by.shape or is_missing:
        raise ValueError("the grid of candidates and seeds is incomplete")
    k = n // 2
    chooses = _splits(n, k)  # (num_splits, n)
    reports = 1.0 - chooses
    is_lost = np.isneginf(chosen_by)
    sums = chooses @ np.where(is_lost, 0.0, chosen_by).T  # (num_splits, num_candidates)
    chosen = np.where(chooses @ is_lost.T > 0, -np.inf, sums).argmax(axis=1)
    by_candidate = [reports[chosen == candidate] for candidate in range(num_candidates)]
    # [r, j, s]: number of splits that choose candidate r, where neither seed j nor seed s chooses
    pairs = np.stack([rows.T @ rows for rows in by_candidate])
    weights = np.einsum("rss->rs", pairs) / (len(chooses) * (n - k))
    others = pairs * (1 - np.eye(n)) / (reports.sum(axis=0)[:, None] * (n - k - 1))
    theta = np.tensordot(weights, reported, 2)
    without = np.tensordot(others.swapaxes(0, 1), reported, 2)  # (n, ...), row j without seed j
    values = theta + (n - 1) * (without.mean(axis=0) - without)
    of_seeds = values if values.ndim == 1 else values.mean(axis=1)
    error = of_seeds.std(ddof=1) / math.sqrt(n)
    by_halves = _error_by_halves(chosen_by, reported)
    if by_halves > error > 0:
        further = (by_halves / error - 1) * (of_seeds - of_seeds.mean())
        values = values + further.reshape(n, *[1] * (values.ndim - 1))
    shares = np.array([len(rows) for rows in by_candidate]) / len(chooses)
    return CrossFit(values, shares)


def _error_by_halves(scores: Array, outcomes: Array) -> float:
    """The standard error of the estimate by deleting half of the seeds; 0 for fewer than eight.

    With fewer, a single seed of a half would choose, and luck would play a far larger part in the
    choice than it does in the estimate.
    """
    n = scores.shape[1]
    half = n // 2
    k = half // 2
    if k < 2:
        return 0.0
    means = outcomes if outcomes.ndim == 2 else outcomes.mean(axis=2)
    scores = np.where(np.isneginf(scores), -1e300, scores)  # -inf times 0 would be NaN
    kept = _splits(n, half, NUM_HALVES).nonzero()[1].reshape(-1, half)
    chooses = _splits(half, k, SPLITS_OF_HALF)
    # [r, h, p]: in half h and split p, what chooses candidate r and what it reports
    sums = np.tensordot(scores[:, kept], chooses, axes=(2, 1))
    reports = np.tensordot(means[:, kept], (1 - chooses) / (half - k), axes=(2, 1))
    chosen = sums.argmax(axis=0)
    thetas = np.take_along_axis(reports, chosen[None], axis=0).mean(axis=(0, 2))
    return float(thetas.std() * math.sqrt(half / (n - half)))


def _splits(n: int, k: int, most: int = MAX_SPLITS) -> Array:
    """Splits of n seeds, (num_splits, n), 1 for k of them: all splits, or `most` random ones."""
    if comb(n, k) <= most:
        places = np.array(list(combinations(range(n), k)))
    else:
        draws = np.random.default_rng(0).random((most, n))
        places = draws.argsort(axis=1)[:, :k]
    splits = np.zeros((len(places), n))
    np.put_along_axis(splits, places, 1.0, axis=1)
    return splits
