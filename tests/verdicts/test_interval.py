"""Intervals against textbook formulas and scipy; ratios of errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.verdicts.family import p_value
from normexp.verdicts.interval import (
    Interval,
    crossed_mean,
    mean,
    smallest_step,
)
from normexp.verdicts.waves import over_sequences, waves_of

DISTINCT = np.array([71.2, 70.4, 72.9, 69.8, 73.5, 70.5, 74.1, 72.0])  # without a tie


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def bounds(found: Interval) -> tuple[float | None, float | None]:
    return found.low, found.high


@pytest.mark.parametrize("values", [[1.0, np.nan], [np.inf, 1.0], [[1.0, 2.0]]])
def test_missing_values_and_tables_are_no_sample(values):
    with pytest.raises(ValueError, match="NaN|one-dimensional"):
        mean(values)


def test_one_value_has_no_bounds_and_none_has_no_estimate():
    one, none = mean([3.0]), mean([])
    assert (one.estimate, *bounds(one), one.n) == (3.0, None, None, 1)
    assert (none.estimate, *bounds(none), none.n) == (None, None, None, 0)


def test_mean_interval_equals_scipy():
    got = mean(DISTINCT)
    expected = scipy_stats.ttest_1samp(DISTINCT, 0).confidence_interval(0.95)
    np.testing.assert_allclose(bounds(got), expected, rtol=1e-12)
    assert (got.n, got.df) == (8, 7)


# Equal values, and bounds


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([97.5, 97.2, 97.5], 0.3),  # a tie: values are counts
        ([97.5, 97.2, 96.8], 0.0),  # none: nothing is known
        ([97.5, 97.5], 0.0),
        ([0.1 + 0.2, 0.3, 0.7], 0.4),  # equal but for rounding
        ([np.nan, 1.0, 1.0, 3.0], 2.0),
        ([], 0.0),
    ],
)
def test_step_is_the_smallest_gap_where_values_repeat(values, step):
    assert smallest_step(values) == pytest.approx(step)


@pytest.mark.parametrize("n", [3, 5, 8, 16])
def test_equal_counts_are_as_uncertain_as_the_rule_of_three_says(n):
    got = mean([97.5] * n, step=0.3)
    rule = 0.3 * (1 - 0.05 ** (1 / n))  # another count in more than this share would show
    assert 0.8 * rule < (got.high - got.low) / 2 < 3 * rule
    assert mean([97.5] * n).low is None  # without a known step


@pytest.mark.parametrize("values", [[80.0, 90.4], [99.9, 100, 100], [0.0, 0.1, 0.0], [100.0] * 8])
def test_no_interval_of_an_accuracy_leaves_its_range(values):
    got = mean(values, step=0.1, bounds=(0, 100))
    assert 0 <= got.low <= got.estimate <= got.high <= 100 and got.low < got.high


def test_in_the_middle_of_the_range_it_is_the_t_interval():
    values = [50.1, 49.8, 50.4, 49.7]
    got, plain = mean(values, bounds=(0, 100)), mean(values)
    np.testing.assert_allclose(bounds(got), bounds(plain), atol=0.002)


# Seeds and test samples


def test_crossed_mean_equals_the_analysis_of_variance(rng):
    table = rng.normal(size=(9, 1)) + rng.normal(size=(1, 30)) + rng.normal(size=(9, 30))
    rows, columns = table.mean(1), table.mean(0)
    residual = table - rows[:, None] - columns + table.mean()
    squares = [rows.var(ddof=1) / 9, columns.var(ddof=1) / 30, (residual**2).sum() / (8 * 29 * 270)]
    got = crossed_mean(table)
    assert got.error**2 == pytest.approx(squares[0] + squares[1] - squares[2])
    total = squares[0] + squares[1] - squares[2]
    centred = columns - columns.mean()
    df = 2 * 30 / (30 * (centred**4).sum() / (centred**2).sum() ** 2 - 1)
    spread = squares[0] ** 2 / 8 + squares[1] ** 2 / min(df, 29) + squares[2] ** 2 / 232
    assert got.df == pytest.approx(total**2 / spread)


@pytest.mark.parametrize("far", [0, 1, 20])
@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0])
def test_test_samples_never_narrow_the_interval_over_seeds_at_any_level(rng, far, spread):
    table = rng.normal(size=(3, 1)) + spread * rng.normal(size=(1, 30)) + far
    both, seeds = crossed_mean(table), mean(table.mean(axis=1))
    assert both.high - both.low >= (seeds.high - seeds.low) * (1 - 1e-9)
    assert p_value(both) >= p_value(seeds) * (1 - 1e-9)


@pytest.mark.parametrize("n", [2, 8, 32])
def test_equal_answers_to_all_samples_are_as_uncertain_as_the_rule_of_three_says(n):
    # 0 of N samples differ: up to -log(.025) = 3.7 of N new ones may, for either norm
    got = crossed_mean(np.zeros((n, 400)), step=0.25)
    assert 3.7 * 0.25 <= got.high == -got.low <= (4.0 if n > 2 else 13) * 0.25


def test_test_samples_widen_the_interval_and_one_seed_has_none(rng):
    correct = rng.uniform(size=(5, 300)) < rng.uniform(size=300)
    assert crossed_mean(correct).error > mean(correct.mean(axis=1)).error
    assert crossed_mean(correct[:1]).low is None
    assert crossed_mean(np.ones((3, 50))).low is None


@pytest.mark.parametrize("topic", [1, 8])
def test_a_text_is_as_uncertain_as_its_topics_are_many(rng, topic):
    """On average, its squared error is that of the mean over independent topics."""
    squares = []
    for _ in range(300):
        topics = rng.normal(size=400 // topic)
        waves = waves_of(np.repeat(topics, topic)[None])
        squares.append(over_sequences(waves[0])[0] / (topics.var(ddof=1) / len(topics)))
    assert np.mean(squares) == pytest.approx(1, abs=0.12)


def test_the_error_over_a_text_is_that_of_its_waves_and_of_seeds(rng):
    """A wave of height 1 is a sixth of the error; one from start to end allows none."""
    seeds, places = rng.normal(size=(6, 1)), (np.arange(300) + 0.5) / 300
    everywhere, slow, faster = (
        crossed_mean(seeds / 10 + height * np.cos(np.pi * count * places), drift=drift)
        for count, height, drift in ((1, 0, 0.0), (1, 1, 9.0), (5, 1, 0.0))
    )
    of_seeds = mean(seeds[:, 0] / 10).error
    assert everywhere.error == pytest.approx(of_seeds)
    assert faster.error == pytest.approx(np.sqrt(of_seeds**2 + 1 / 2 / 6))
    assert slow.low is None and "over 300 of 300" in slow.why
    hidden = crossed_mean(seeds * 10 + np.cos(np.pi * places), drift=9.0)
    assert hidden.low is not None
