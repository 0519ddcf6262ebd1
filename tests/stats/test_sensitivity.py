"""Batch-size sensitivity against regressions and trapezoids per seed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats import Interval, batch_size_sensitivity, mean, size_threshold

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


def test_area_of_a_straight_line_is_its_middle():
    # uneven sizes: 1, 2, 16 are 0, 1, 4 on the log2 axis; the line is 10 + 3 log2 size
    rows = 10 + 3 * np.log2([[1, 2, 16]] * 2)
    assert sensitivity(rows, [1, 2, 16]).area.estimate == pytest.approx(10 + 3 * 2)


def test_area_by_hand():
    # trapezoids (0+2)/2 * 1 + (2+4)/2 * 3 = 10, range 4
    assert sensitivity([[0.0, 2.0, 4.0]], [1, 2, 16]).area.estimate == pytest.approx(2.5)


def test_direction_turns_the_sign_of_losses():
    values = [[1.0, 3.0], [2.0, 3.5]]
    up = sensitivity(values, [2, 8])
    down = sensitivity(values, [2, 8], higher_is_better=False)
    assert (up.drop.estimate, up.slope.estimate) == (1.75, 0.875)
    assert (down.drop.estimate, down.slope.estimate) == (-1.75, -0.875)
    assert up.area == down.area


def test_missing_seeds_are_left_out_and_counted(table):
    table[0, 0] = table[1, 1] = NAN
    got = sensitivity(table)
    assert got.drop == mean(table[1:, 3] - table[1:, 0])
    assert got.losses[32].n == 6
    assert (got.drop.n, got.slope.n, got.area.n, got.num_seeds) == (5, 4, 4, 6)


def test_size_where_all_diverged_has_no_estimate_and_no_verdict(table):
    table[:, 0] = NAN
    got = sensitivity(table, tolerance=100)
    assert (got.drop.estimate, got.drop.n, got.slope.estimate) == (None, 0, None)
    assert (got.threshold.size, got.threshold.status) == (8, "unknown")


def test_one_seed_gives_estimates_without_intervals(table):
    got = sensitivity(table[:1])
    for number in (got.drop, got.slope, got.area):
        assert number.n == 1 and number.estimate is not None and number.low is None
    assert (got.threshold.size, got.threshold.status) == (128, "unknown")


def test_no_seed_gives_no_numbers():
    got = sensitivity(np.empty((0, 2)), [2, 8])
    assert (got.drop.estimate, got.area.estimate, got.num_seeds) == (None, None, 0)


@pytest.mark.parametrize(
    ("tolerance", "size", "status"), [(1, 128, "always"), (5, 32, "below"), (20, 2, "never")]
)
def test_threshold_of_a_planted_drop(table, tolerance, size, status):
    threshold = sensitivity(table, tolerance=tolerance).threshold  # losses near 3, 6, 9 at 32, 8, 2
    assert (threshold.size, threshold.status) == (size, status)


def test_wide_interval_is_not_shown_to_exceed():
    losses = {2: bounds(0.9, 3.0), 8: bounds(-1.0, 2.0), 32: bounds(-0.1, 0.5)}
    got = size_threshold(losses, 128, tolerance=1.0)
    assert (got.size, got.status) == (2, "never")


def test_smaller_size_that_recovers_does_not_count():
    losses = {2: bounds(-0.1, 0.1), 8: bounds(2.0, 3.0), 32: bounds(-0.1, 0.5)}
    got = size_threshold(losses, 128, tolerance=1.0)
    assert (got.size, got.status) == (32, "below")


def test_same_value_at_every_size_loses_exactly_nothing():
    got = sensitivity(np.repeat([[80.0], [81.5], [79.0]], 3, axis=1), [2, 8, 32], tolerance=0)
    assert (got.drop.low, got.drop.estimate, got.drop.high) == (0, 0, 0)
    assert (got.threshold.size, got.threshold.status) == (2, "never")


@pytest.mark.parametrize("sizes", [[2, 2], [0, 2], [8, 2], [4]])
def test_sizes_must_ascend_and_be_positive(sizes):
    with pytest.raises(ValueError, match="sizes="):
        sensitivity(np.ones((3, len(sizes))), sizes)


@pytest.mark.parametrize(
    ("values", "message"),
    [(np.ones((3, 3)), "shape"), (np.ones(3), "shape"), ([[1, np.inf]], "NaN")],
)
def test_another_shape_and_infinity_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        sensitivity(values, [2, 4])
