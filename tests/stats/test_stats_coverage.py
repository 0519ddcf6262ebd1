"""How often nominal 95 % intervals cover the truth, simulated at the n that users have."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats.interval import (
    crossed_mean,
    mean,
    paired_difference,
    paired_improvement,
    stratified_mean,
)
from normexp.stats.sensitivity import batch_size_sensitivity

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


def test_location_intervals_hold_their_coverage(n, rng):
    intervals = [mean(row) for row in rng.normal(size=(SIMULATIONS, n))]
    assert LOW <= covered(intervals, 0.0) <= HIGH


def test_paired_difference_holds_its_coverage(n, rng):
    shared = 10 * rng.normal(size=(SIMULATIONS, n))
    a, b = shared + rng.normal(1, 2, size=shared.shape), shared + rng.normal(size=shared.shape)
    intervals = [paired_difference(x, y) for x, y in zip(a, b, strict=True)]
    assert LOW <= covered(intervals, 1.0) <= HIGH


def test_stratified_mean_holds_its_coverage_with_unequal_spread_and_n(n, rng):
    wide, narrow = rng.normal(1, 4, (SIMULATIONS, n)), rng.normal(2, 1, (SIMULATIONS, n - 1))
    intervals = [stratified_mean(pair) for pair in zip(wide, narrow, strict=True)]
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


@pytest.mark.slow
def test_sensitivity_numbers_hold_their_coverage(n, rng):
    sizes, curve = [2, 8, 64], np.array([88.0, 90.0, 92.5])
    tables = curve + rng.normal(size=(SIMULATIONS, n, 1)) + rng.normal(size=(SIMULATIONS, n, 3))
    results = [
        batch_size_sensitivity(t, sizes, higher_is_better=True, tolerance=1.0) for t in tables
    ]
    assert LOW <= covered([r.drop for r in results], 4.5) <= HIGH
    assert covered([r.slope for r in results], np.polyfit(np.log2(sizes), curve, 1)[0]) >= LOW
    assert covered([r.regret for r in results], 4.5) >= LOW  # of the best size, not known before


@pytest.mark.slow
@pytest.mark.parametrize("truth", [0.0, 1.0])
def test_regret_covers_however_many_sizes_are_equally_good(n, rng, truth):
    tables = np.array([90.0 - truth, 90, 90, 90]) + rng.normal(size=(SIMULATIONS, n, 4))
    results = [
        batch_size_sensitivity(t, [2, 8, 32, 128], higher_is_better=True, tolerance=1.0)
        for t in tables
    ]
    assert covered([r.regret for r in results], truth) >= 0.95 - 0.012


# Accuracies: counts of a test set, near 100 % and with ties


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [300, 10_000])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_coverage_of_a_mean_accuracy(num_samples, spread):
    """Prints the table; 2,000 studies have a binomial error of .005 at .95.

    spread: standard deviation between seeds as a share of the error rate (of 10 % at 50 %)
    """
    rng = np.random.default_rng(0)
    for accuracy in (0.5, 0.9, 0.99, 0.995):
        deviation = spread * min(1 - accuracy, 0.1)
        true = np.full((2000, 16), accuracy)
        if deviation:
            concentration = accuracy * (1 - accuracy) / deviation**2 - 1
            shape = accuracy * concentration, (1 - accuracy) * concentration
            true = rng.beta(*shape, size=true.shape)
        values = 100 * rng.binomial(num_samples, true) / num_samples
        for n in (2, 3, 5, 8, 16):
            own = values[:, :n]
            found = [mean(row, step=100 / num_samples, bounds=(0, 100)) for row in own]
            rate = covered(found, 100 * accuracy)
            width = np.median([i.high - i.low for i in found])
            print(
                f"N={num_samples} sd={deviation:.4f} {accuracy:.1%} n={n}: {rate:.3f} "
                f"(width {width:.2f})"
            )
            assert all(i.low >= 0 and i.high <= 100 for i in found)
            assert rate >= 0.935


# Seeds and test samples: networks agree on which images are hard


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [3, 5, 8])
def test_coverage_over_seeds_and_test_samples(num_seeds):
    """New seeds and samples; the interval over seeds alone covers less as seeds grow."""
    rng = np.random.default_rng(0)

    def gaps(n: int, count: int) -> np.ndarray:
        """Correctness of one norm minus that of another with lower accuracy, per image."""
        hard, more = rng.normal(2.5, 2, count), rng.normal(0.25, 0.5, count)
        seeds = rng.normal(0, 0.05, (2, n, 1))
        noise = rng.logistic(size=(2, n, count))
        return ((hard + seeds[0] + noise[0] > 0) * 100.0) - (
            hard - more + seeds[1] + noise[1] > 0
        ) * 100

    truth = np.mean([gaps(1, 1_000_000).mean() for _ in range(4)])
    tables = [gaps(num_seeds, 300) for _ in range(1000)]
    both = covered([crossed_mean(table) for table in tables], truth)
    alone = covered([mean(table.mean(axis=1), step=1 / 3) for table in tables], truth)
    print(f"n={num_seeds}: over seeds and samples {both:.3f}, over seeds {alone:.3f}")
    assert both >= 0.93 and (num_seeds < 8 or alone < 0.94)
