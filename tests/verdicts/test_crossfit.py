"""Cross-fitting against a plain enumeration of splits."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from normexp.verdicts.crossfit import cross_fit
from normexp.verdicts.interval import crossed_mean, mean


def plain(scores: np.ndarray, outcomes: np.ndarray, k: int) -> float:
    """The mean over splits, one split at a time."""
    n, found = scores.shape[1], []
    for choose in map(list, combinations(range(n), k)):
        rate = scores[:, choose].mean(axis=1).argmax()
        found.append(np.delete(outcomes[rate], choose).mean())
    return float(np.mean(found))


@pytest.mark.parametrize("n", [3, 4, 7, 8])
def test_estimate_and_error_equal_the_jackknives_of_the_enumeration(n):
    """The larger of the errors by deleting one seed, and half of the seeds."""
    rng = np.random.default_rng(n)
    scores, outcomes = rng.normal(size=(2, 5, n))
    got = mean(cross_fit(scores, outcomes).values)
    k = n // 2
    without = [
        plain(np.delete(scores, seed, 1), np.delete(outcomes, seed, 1), k) for seed in range(n)
    ]
    assert got.estimate == pytest.approx(plain(scores, outcomes, k))
    half = n // 2
    halves = [
        plain(scores[:, kept], outcomes[:, kept], half // 2)
        for kept in map(list, combinations(range(n), half))
        if half > 3
    ]
    by_halves = np.var(halves) * half / (n - half) if halves else 0.0
    assert got.error**2 == pytest.approx(max((n - 1) * np.var(without), by_halves))
    assert got.df == n - 1


def test_with_test_samples_seeds_have_the_same_values():
    rng = np.random.default_rng(0)
    scores, tables = rng.normal(size=(3, 8)), rng.normal(size=(3, 8, 50))
    fit, means = cross_fit(scores, tables), cross_fit(scores, tables.mean(axis=2))
    np.testing.assert_allclose(fit.values.mean(axis=1), means.values)
    (over_seeds,) = crossed_mean(fit.values).further
    assert over_seeds == pytest.approx((7, mean(means.values, step=0.0).error))


@pytest.mark.parametrize(("n", "tolerance"), [(6, 1e-9), (20, 0.05)])  # of 20, splits are drawn
def test_a_rate_that_always_wins_leaves_the_outcomes_as_they_are(n, tolerance):
    draws = np.random.default_rng(1)
    moved, errors = [], []
    for _ in range(40):
        outcomes = draws.normal(size=(2, n))
        fit = cross_fit(np.array([[0.0] * n, [1.0] * n]), outcomes)
        got, expected = mean(fit.values), mean(outcomes[1])
        moved.append(abs(got.estimate - expected.estimate) / expected.error)
        errors.append(got.error / expected.error)
        assert np.corrcoef(fit.values, outcomes[1])[0, 1] > 1 - tolerance / 10
        assert fit.shares.tolist() == [0.0, 1.0]
    assert np.mean(moved) < tolerance / 3
    assert np.mean(errors) == pytest.approx(1, rel=tolerance)


def test_a_rate_is_not_chosen_by_seeds_that_diverged_at_it():
    scores, outcomes = np.zeros((2, 4)), np.array([[1.0] * 4, [2.0] * 4])
    scores[1] = 1.0, 1.0, 1.0, -np.inf
    fit = cross_fit(scores, outcomes)  # 3 of the 6 pairs of seeds include the last one
    assert fit.shares.tolist() == [0.5, 0.5]
    assert fit.values.mean() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("scores", "outcomes", "words"),
    [
        (np.full((2, 4), np.nan), np.zeros((2, 4)), "incomplete"),
        (np.zeros((2, 4)), np.full((2, 4), np.nan), "incomplete"),
        (np.zeros((2, 4)), np.zeros((2, 3)), "incomplete"),
        (np.zeros((2, 2)), np.zeros((2, 2)), "it takes 3"),
    ],
)
def test_incomplete_grids_and_two_seeds_are_refused(scores, outcomes, words):
    with pytest.raises(ValueError, match=words):
        cross_fit(scores, outcomes)
