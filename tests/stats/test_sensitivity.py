"""Batch-size sensitivity against regressions and trapezoids per seed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats.interval import Interval, mean
from normexp.stats.sensitivity import batch_size_sensitivity, selection_optimism, size_threshold

SIZES = [2, 8, 32, 128]
NAN = float("nan")


@pytest.fixture
def table():
    """Six seeds: 90 - 1.5 per halving from 128, a seed effect, and small noise."""
    rng = np.random.default_rng(0)
    curve = 90 - 1.5 * (7 - np.log2(SIZES))
    return curve + 5 * rng.normal(size=(6, 1)) + 0.1 * rng.normal(size=(6, 4))


def bounds(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high, 0.95, 6)


def sensitivity(values, sizes=SIZES, *, higher_is_better=True, tolerance=1.0):
    return batch_size_sensitivity(
        values, sizes, higher_is_better=higher_is_better, tolerance=tolerance
    )


def test_drop_equals_scipys_paired_interval(table):
    got = sensitivity(table).losses
    expected = scipy_stats.ttest_rel(table[:, 3], table[:, 0]).confidence_interval(0.95)
    np.testing.assert_allclose((got[2].low, got[2].high), expected, rtol=1e-12)
    assert list(got) == [2, 8, 32]
    assert got[2].estimate == pytest.approx(9.0, abs=0.3)


def test_slope_equals_a_regression_per_seed(table):
    got = sensitivity(table).slope
    slopes = [scipy_stats.linregress(np.log2(SIZES), row).slope for row in table]
    assert got.estimate == pytest.approx(np.mean(slopes), abs=1e-12)
    assert got.estimate == pytest.approx(1.5, abs=0.05)
    assert (got.low, got.high) == pytest.approx((mean(slopes).low, mean(slopes).high))


def test_direction_turns_the_sign_of_losses():
    values = [[1.0, 3.0], [2.0, 3.5]]
    up = sensitivity(values, [2, 8])
    down = sensitivity(values, [2, 8], higher_is_better=False)
    assert (up.drop.estimate, up.slope.estimate) == (1.75, 0.875)
    assert (down.drop.estimate, down.slope.estimate) == (-1.75, -0.875)


def test_missing_seeds_are_left_out_and_counted(table):
    table[0, 0] = table[1, 1] = NAN
    got = sensitivity(table)
    assert got.drop == mean(table[1:, 3] - table[1:, 0])
    assert got.losses[32].n == 6
    assert (got.drop.n, got.slope.n, got.regret.n, got.num_seeds) == (5, 4, 4, 6)


def test_one_seed_gives_estimates_without_intervals(table):
    got = sensitivity(table[:1])
    for number in (got.drop, got.slope, got.regret):
        assert number.n == 1 and number.estimate is not None and number.low is None
    assert got.threshold.between is not None and got.threshold.low is None


def test_no_seed_gives_no_numbers():
    got = sensitivity(np.empty((0, 2)), [2, 8])
    assert (got.drop.estimate, got.best_size, got.regret.estimate) == (None, None, None)


# Regret


def test_regret_is_the_loss_from_the_best_size_with_a_wider_interval(table):
    table[:, 2] += 5  # the best size is 32, between the ends
    got = sensitivity(table)
    plain = mean(table[:, 2] - table[:, 0])
    assert got.best_size == 32 and got.regret.estimate == pytest.approx(plain.estimate)
    assert got.regret.low < plain.low and got.regret.high > plain.high


def test_a_best_smallest_size_has_no_regret_but_is_not_certain_to_be_the_best():
    rng = np.random.default_rng(1)
    values = np.array([90.2, 90.0, 90.0]) + rng.normal(0, 0.5, (6, 3))
    values[:, 0] += 90.2 - values[:, 0].mean()
    values[:, 1:] += 90.0 - values[:, 1:].mean(axis=0)
    got = sensitivity(values, [2, 8, 32])
    assert (got.best_size, got.regret.estimate, got.regret.low) == (2, 0, 0) and got.regret.high > 0


# The size at which the loss passes the tolerance


def test_threshold_lies_between_two_adjacent_sizes_that_were_run():
    line = {size: 1.5 * np.log2(128 / size) for size in (2, 4, 8, 16, 32, 64)}
    fine = {size: bounds(loss - 0.5, loss + 0.5) for size, loss in line.items()}
    coarse = {size: fine[size] for size in (2,)}
    found = [size_threshold(losses, 128, tolerance=5.0) for losses in (fine, coarse)]
    assert [one.between for one in found] == [(8, 16), (2, 128)]
    assert (found[0].low, found[0].high) == (8, 16)


def test_a_wide_interval_shows_no_size_and_rules_none_out():
    losses = {2: bounds(0.9, 3.0), 8: bounds(-1.0, 2.0), 32: bounds(-0.1, 0.5)}
    got = size_threshold(losses, 128, tolerance=1.0)
    assert got.low is None and got.high == 32


def test_a_threshold_beyond_the_smallest_size_is_not_reached():
    losses = {2: bounds(0.1, 0.3), 8: bounds(0.0, 0.2)}
    got = size_threshold(losses, 128, tolerance=1.0)
    assert (got.between, got.low, got.high) == (None, None, None)


# The choice of a learning rate


def test_a_choice_among_equal_candidates_flatters_and_one_among_distinct_ones_does_not():
    rng = np.random.default_rng(0)
    equal, distinct = [], []
    for _ in range(300):
        noise = rng.normal(size=(8, 5))
        equal.append(selection_optimism(noise, noise))
        apart = noise + 10 * np.arange(5)
        distinct.append(selection_optimism(apart, apart))
    assert np.mean(equal) == pytest.approx(1.163 / np.sqrt(8), rel=0.25)  # E max of 5 normals
    assert np.abs(distinct).max() == 0
    assert selection_optimism(noise[:2], noise[:2]) is None  # too few to tell
