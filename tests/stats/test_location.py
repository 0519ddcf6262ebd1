from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats import iqm, mean, median

# rliable 1.2.0: metrics.aggregate_iqm and aggregate_mean of SCORES[:, None].
SCORES = np.array([71.2, 70.4, 72.9, 69.8, 73.5, 70.4, 74.1, 72.0])
RLIABLE_IQM, RLIABLE_MEAN = 71.625, 71.7875


def test_mean_interval_equals_scipy():
    got = mean(SCORES, level=0.9)
    expected = scipy_stats.ttest_1samp(SCORES, 0).confidence_interval(0.9)
    np.testing.assert_allclose((got.low, got.high), expected, rtol=1e-12)
    assert (got.n, got.level) == (8, 0.9)


def test_mean_and_iqm_equal_rliable():
    assert mean(SCORES).estimate == pytest.approx(RLIABLE_MEAN, abs=1e-12)
    assert iqm(SCORES).estimate == pytest.approx(RLIABLE_IQM, abs=1e-12)


@pytest.mark.parametrize("n", range(1, 21))
def test_iqm_equals_scipy_trim_mean(n):
    values = np.random.default_rng(n).normal(size=n)
    assert iqm(values).estimate == pytest.approx(scipy_stats.trim_mean(values, 0.25), abs=1e-12)
    assert median(values).estimate == np.median(values)


def test_iqm_interval_equals_scipy_trimmed_interval_where_a_quarter_is_whole():
    # scipy divides by (1 - 2 * 0.25)^2 n where Yuen has h (h - 1) / (n - 1): the widths differ by
    # sqrt(n^2 / 4 / (h (h - 1)) * (n - 1) / n), here h = 4 of n = 8.
    got = iqm(SCORES)
    low, high = scipy_stats.mstats.trimmed_mean_ci(SCORES, limits=(0.25, 0.25), alpha=0.05)
    ratio = np.sqrt(64 / 4 / 12 * 7 / 8)
    np.testing.assert_allclose(got.high - got.low, (high - low) * ratio, rtol=1e-9)


def test_iqm_of_three_is_their_mean():
    three, plain = iqm([1.0, 2.0, 6.0]), mean([1.0, 2.0, 6.0])
    assert (three.estimate, three.low, three.high) == (plain.estimate, plain.low, plain.high)


def test_iqm_ignores_one_wild_seed_of_five():
    tame, wild = iqm([1.0, 2, 3, 4, 5]), iqm([1.0, 2, 3, 4, 5000])
    assert (tame.estimate, tame.low, tame.high) == (wild.estimate, wild.low, wild.high)


def test_median_interval_by_hand():
    # n = 8: c(1) = 1 - 2/256, c(2) = 1 - 18/256; f = (c1 - .95) / (c1 - c2) = .675,
    # w = 7 * .675 / (1 + 6 * .675) = .93564
    got = median(np.arange(8.0))
    w = 7 * 0.675 / (1 + 6 * 0.675)
    assert (got.estimate, got.level) == (3.5, 0.95)
    np.testing.assert_allclose((got.low, got.high), (w, 7 - w), rtol=1e-12)


def test_median_of_five_states_the_level_it_has():
    got = median([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (got.low, got.estimate, got.high, got.level) == (1.0, 3.0, 5.0, 0.9375)


def test_median_of_four_has_no_bounds_at_95_percent():
    assert median([1.0, 2.0, 3.0, 4.0]).low is None
    assert median([1.0, 2.0, 3.0, 4.0], level=0.85).low is not None


@pytest.mark.parametrize("level", [0.01, 0.3, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("n", [2, 3, 7, 30])
def test_median_bounds_enclose_the_estimate_at_any_level(n, level):
    got = median(np.random.default_rng(n).normal(size=n), level=level)
    if got.low is not None:
        assert got.low <= got.estimate <= got.high


@pytest.mark.parametrize("statistic", [mean, median, iqm])
def test_one_seed_has_no_interval_and_none_has_no_estimate(statistic):
    one, none = statistic([3.0]), statistic([])
    assert (one.estimate, one.low, one.high, one.n) == (3.0, None, None, 1)
    assert (none.estimate, none.low, none.high, none.n) == (None, None, None, 0)


@pytest.mark.parametrize("statistic", [mean, median, iqm])
def test_equal_values_give_an_interval_of_width_zero(statistic):
    got = statistic([0.1] * 8)
    np.testing.assert_allclose((got.low, got.estimate, got.high), 0.1, rtol=1e-12)
