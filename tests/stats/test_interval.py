"""Intervals against textbook formulas, scipy and rliable."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats import (
    Interval,
    holm,
    iqm,
    mean,
    median,
    p_value,
    paired_difference,
    paired_improvement,
    stratified_difference,
)
from normexp.stats.interval import as_sample, t_interval

# rliable 1.2.0: metrics.aggregate_iqm and aggregate_mean of SCORES[:, None].
SCORES = np.array([71.2, 70.4, 72.9, 69.8, 73.5, 70.4, 74.1, 72.0])
RLIABLE_IQM, RLIABLE_MEAN = 71.625, 71.7875
# statsmodels 0.15.0: multipletests(P_VALUES, 0.05, "holm")
P_VALUES = [0.011, 0.04, 0.003, 0.04, 0.7, 0.02]
ADJUSTED = [0.055, 0.12, 0.018, 0.12, 0.7, 0.08]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def bounds(found: Interval) -> tuple[float | None, float | None]:
    return found.low, found.high


# What an interval is


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_level_must_be_a_probability(level):
    with pytest.raises(ValueError, match=f"level={level}"):
        Interval(1.0, 0.0, 2.0, level, 3)


def test_a_single_bound_is_refused():
    with pytest.raises(ValueError, match="both bounds"):
        Interval(1.0, 0.0, None, 0.95, 3)


@pytest.mark.parametrize("values", [[1.0, np.nan], [np.inf, 1.0], [[1.0, 2.0]]])
def test_missing_values_and_tables_are_no_sample(values):
    with pytest.raises(ValueError, match="NaN|one-dimensional"):
        as_sample(values)


@pytest.mark.parametrize("statistic", [mean, median, iqm])
def test_one_value_has_no_bounds_and_none_has_no_estimate(statistic):
    one, none = statistic([3.0]), statistic([])
    assert (one.estimate, *bounds(one), one.n) == (3.0, None, None, 1)
    assert (none.estimate, *bounds(none), none.n) == (None, None, None, 0)


@pytest.mark.parametrize("statistic", [mean, median, iqm])
def test_eight_equal_values_give_an_interval_of_width_zero(statistic):
    np.testing.assert_allclose(bounds(statistic([0.1] * 8)), 0.1, rtol=1e-12)


@pytest.mark.parametrize(("n", "is_bounded"), [(2, False), (5, False), (6, True)])
def test_few_equal_values_have_no_bounds(n, is_bounded):
    for error in (0.0, 1e-16):  # equal values may differ in their last digits
        got = t_interval(0.3, error, n - 1, n=n)
        assert (got.low is not None) is is_bounded
    assert bounds(mean([0.0] * n)) == (0.0, 0.0)


# Location


def test_mean_interval_equals_scipy():
    got = mean(SCORES)
    expected = scipy_stats.ttest_1samp(SCORES, 0).confidence_interval(0.95)
    np.testing.assert_allclose(bounds(got), expected, rtol=1e-12)
    assert (got.n, got.level, got.df) == (8, 0.95, 7)


def test_mean_and_iqm_equal_rliable():
    assert mean(SCORES).estimate == pytest.approx(RLIABLE_MEAN, abs=1e-12)
    assert iqm(SCORES).estimate == pytest.approx(RLIABLE_IQM, abs=1e-12)


@pytest.mark.parametrize("n", range(1, 21))
def test_iqm_and_median_equal_scipy_and_numpy(n):
    values = np.random.default_rng(n).normal(size=n)
    assert iqm(values).estimate == pytest.approx(scipy_stats.trim_mean(values, 0.25), abs=1e-12)
    assert median(values).estimate == np.median(values)


def test_iqm_interval_equals_scipys_where_a_quarter_is_whole():
    # scipy divides by (1 - 2 * 0.25)^2 n where Yuen has h (h - 1) / (n - 1): the widths differ by
    # sqrt(n^2 / 4 / (h (h - 1)) * (n - 1) / n), here h = 4 of n = 8.
    got = iqm(SCORES)
    low, high = scipy_stats.mstats.trimmed_mean_ci(SCORES, limits=(0.25, 0.25), alpha=0.05)
    ratio = np.sqrt(64 / 4 / 12 * 7 / 8)
    np.testing.assert_allclose(got.high - got.low, (high - low) * ratio, rtol=1e-9)


def test_iqm_ignores_one_wild_seed_of_five_and_trims_nothing_of_three():
    assert iqm([1.0, 2, 3, 4, 5]) == iqm([1.0, 2, 3, 4, 5000])
    assert iqm([1.0, 2.0, 6.0]) == mean([1.0, 2.0, 6.0])


def test_median_interval_by_hand():
    # n = 8: c(1) = 1 - 2/256, c(2) = 1 - 18/256; f = (c1 - .95) / (c1 - c2) = .675,
    # w = 7 * .675 / (1 + 6 * .675) = .93564
    w = 7 * 0.675 / (1 + 6 * 0.675)
    got = median(np.arange(8.0))
    assert (got.estimate, got.level) == (3.5, 0.95)
    np.testing.assert_allclose(bounds(got), (w, 7 - w), rtol=1e-12)


def test_median_of_five_states_the_level_it_has_and_of_four_has_no_bounds():
    got = median([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (got.low, got.estimate, got.high, got.level) == (1.0, 3.0, 5.0, 0.9375)
    assert median([1.0, 2.0, 3.0, 4.0]).low is None


@pytest.mark.parametrize("n", [5, 6, 7, 30])
def test_median_bounds_enclose_the_estimate(n):
    got = median(np.random.default_rng(n).normal(size=n))
    assert got.low <= got.estimate <= got.high


# Differences


def test_paired_difference_and_its_p_equal_scipy(rng):
    for n in (2, 5, 8):
        a, b = rng.normal(0.5, 1, n), rng.normal(size=n)
        got, test = paired_difference(a, b), scipy_stats.ttest_rel(a, b)
        np.testing.assert_allclose(bounds(got), test.confidence_interval(0.95), rtol=1e-12)
        assert (got.n, p_value(got)) == (n, pytest.approx(test.pvalue))


def test_what_seeds_share_does_not_widen_the_interval(rng):
    a, b, shared = rng.normal(size=(3, 6))
    plain, shifted = paired_difference(a, b), paired_difference(a + 1e3 * shared, b + 1e3 * shared)
    np.testing.assert_allclose(bounds(shifted), bounds(plain), rtol=1e-8)


def test_one_data_set_is_the_paired_difference(rng):
    a, b = rng.normal(size=(2, 5))
    np.testing.assert_allclose(
        bounds(stratified_difference([(a, b)])), bounds(paired_difference(a, b)), rtol=1e-12
    )


def test_two_data_sets_equal_welchs_interval_and_p(rng):
    # (d1 + d2) / 2 is half of the difference d1 - (-d2), for which scipy has Welch's test
    first, second = rng.normal(1, 1, size=5), rng.normal(3, 4, size=9)
    got = stratified_difference([(first, np.zeros(5)), (second, np.zeros(9))])
    welch = scipy_stats.ttest_ind(first, -second, equal_var=False)
    expected = np.array(welch.confidence_interval(0.95)) / 2
    np.testing.assert_allclose(bounds(got), expected, rtol=1e-12)
    assert (got.n, p_value(got)) == (14, pytest.approx(welch.pvalue))


def test_data_sets_weigh_the_same_whatever_their_number_of_seeds():
    got = stratified_difference([([1.0] * 6, np.zeros(6)), ([5.0, 5], np.zeros(2))])
    assert (got.low, got.estimate, got.high) == (3.0, 3.0, 3.0)


def test_a_data_set_with_one_pair_leaves_no_bounds_and_one_without_no_estimate():
    full = ([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    one = stratified_difference([full, ([3.0], [0.0])])
    assert (one.estimate, *bounds(one), one.n) == (pytest.approx((7 / 3 + 3) / 2), None, None, 4)
    assert stratified_difference([full, ([], [])]).estimate is None
    assert stratified_difference([]).estimate is None


def test_p_without_spread_without_bounds_or_without_a_t_interval():
    assert p_value(Interval(0.0, 0.0, 0.0, 0.95, 8, 7)) == 1
    assert p_value(Interval(1.0, 1.0, 1.0, 0.95, 8, 7)) == 0
    assert p_value(Interval(1.0, None, None, 0.95, 1)) == 1
    with pytest.raises(ValueError, match="t interval"):
        p_value(paired_improvement(np.ones(8), np.zeros(8), higher_is_better=True))


# Probability of improvement


def test_improvement_equals_scipys_exact_interval():
    for wins in range(9):
        a = np.r_[np.ones(wins), -np.ones(8 - wins)]
        got = paired_improvement(a, np.zeros(8), higher_is_better=True)
        expected = scipy_stats.binomtest(wins, 8).proportion_ci(0.95, "exact")
        assert got.estimate == wins / 8
        np.testing.assert_allclose(bounds(got), expected, atol=1e-12)


def test_ties_count_one_half_and_lower_may_be_better():
    a, b = [1.0, 0.0, 2.0, 5.0], [1.0] * 4
    assert paired_improvement(a, b, higher_is_better=True).estimate == 2.5 / 4
    assert paired_improvement(a, b, higher_is_better=False).estimate == 1.5 / 4


def test_five_pairs_never_exclude_one_half_and_one_has_no_bounds():
    lows = [
        paired_improvement(np.ones(n), np.zeros(n), higher_is_better=True).low for n in (1, 5, 6)
    ]
    assert lows[0] is None and lows[1] < 0.5 < lows[2]
    assert paired_improvement([], [], higher_is_better=True).estimate is None


@pytest.mark.parametrize("statistic", [paired_difference, paired_improvement])
def test_unmatched_samples_are_refused(statistic):
    words = {} if statistic is paired_difference else {"higher_is_better": True}
    with pytest.raises(ValueError, match="pair them by seed"):
        statistic([1.0, 2.0], [1.0], **words)


# Families


def test_holm_equals_statsmodels():
    got = holm(dict(zip("abcdef", P_VALUES, strict=True)))
    assert got == pytest.approx(dict(zip("abcdef", ADJUSTED, strict=True)), rel=1e-12)


def test_holm_stops_at_the_first_that_is_not_rejected_and_at_one():
    assert holm({"a": 0.03, "b": 0.031}) == pytest.approx({"a": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@pytest.mark.parametrize("p", [1.2, -0.1, np.nan])
def test_what_is_no_p_value_is_refused(p):
    with pytest.raises(ValueError, match="p value|NaN"):
        holm({"a": p})


def test_holm_keeps_the_familywise_error_rate():
    rng = np.random.default_rng(1)
    families = rng.uniform(size=(4000, 5))
    rejects = [min(holm(dict(enumerate(p))).values()) <= 0.05 for p in families]
    assert np.mean(rejects) == pytest.approx(0.05, abs=0.01)
