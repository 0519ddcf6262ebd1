"""How often the nominal 95 % intervals hold the truth, by simulation at the n that users have."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats import (
    batch_size_sensitivity,
    iqm,
    mean,
    median,
    paired_difference,
    paired_improvement,
    stratified_difference,
)

SIMULATIONS = 4000
LOW, HIGH = 0.93, 0.97  # 4,000 simulations have a standard error of .0034


def covered(intervals, truth: float) -> float:
    return float(np.mean([i.low <= truth <= i.high for i in intervals]))


@pytest.fixture(params=[5, 8, 20])
def n(request):
    return request.param


@pytest.fixture
def rng(n):
    return np.random.default_rng(100 + n)


@pytest.mark.parametrize("statistic", [mean, median, iqm])
def test_location_intervals_hold_their_coverage(statistic, n, rng):
    intervals = [statistic(row) for row in rng.normal(size=(SIMULATIONS, n))]
    assert LOW <= covered(intervals, 0.0) <= HIGH


def test_paired_difference_holds_its_coverage(n, rng):
    shared = 10 * rng.normal(size=(SIMULATIONS, n))
    a, b = shared + rng.normal(1, 2, size=shared.shape), shared + rng.normal(size=shared.shape)
    intervals = [paired_difference(x, y) for x, y in zip(a, b, strict=True)]
    assert LOW <= covered(intervals, 1.0) <= HIGH


def test_stratified_difference_holds_its_coverage_with_unequal_spread_and_n(n, rng):
    wide, narrow = rng.normal(1, 4, (SIMULATIONS, n)), rng.normal(2, 1, (SIMULATIONS, n - 1))
    zero, shorter = np.zeros(n), np.zeros(n - 1)
    intervals = [
        stratified_difference([(x, zero), (y, shorter)]) for x, y in zip(wide, narrow, strict=True)
    ]
    assert LOW <= covered(intervals, 1.5) <= HIGH


def test_paired_improvement_never_covers_less_than_its_level(n):
    # no simulation: the number of wins is binomial, so the coverage is a sum
    wins = np.arange(n + 1)
    intervals = [
        paired_improvement(np.r_[np.ones(w), -np.ones(n - w)], np.zeros(n), higher_is_better=True)
        for w in wins
    ]
    for truth in np.linspace(0.01, 0.99, 99):
        holds = np.array([i.low <= truth <= i.high for i in intervals])
        assert scipy_stats.binom.pmf(wins, n, truth)[holds].sum() >= 0.95


def test_sensitivity_numbers_hold_their_coverage(n, rng):
    sizes, curve = [2, 8, 64], np.array([88.0, 90.0, 92.5])
    tables = curve + rng.normal(size=(SIMULATIONS, n, 1)) + rng.normal(size=(SIMULATIONS, n, 3))
    results = [
        batch_size_sensitivity(t, sizes, higher_is_better=True, tolerance=1.0) for t in tables
    ]
    x = np.log2(sizes)
    area = ((88 + 90) / 2 * 2 + (90 + 92.5) / 2 * 3) / 5
    assert LOW <= covered([r.drop for r in results], 4.5) <= HIGH
    assert LOW <= covered([r.slope for r in results], np.polyfit(x, curve, 1)[0]) <= HIGH
    assert LOW <= covered([r.area for r in results], area) <= HIGH


def test_loss_equal_to_the_tolerance_is_called_excessive_at_the_stated_rate(n, rng):
    tables = np.array([89.0, 90.0]) + rng.normal(size=(SIMULATIONS, n, 2))
    statuses = [
        batch_size_sensitivity(t, [2, 32], higher_is_better=True, tolerance=1.0).threshold.status
        for t in tables
    ]
    assert np.mean([s == "always" for s in statuses]) == pytest.approx(0.025, abs=0.008)
