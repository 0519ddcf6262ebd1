from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats import mean, paired_difference, sign_flip_p_value, stratified_difference


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_paired_difference_equals_scipy(rng):
    a, b = rng.normal(size=(2, 7))
    got = paired_difference(a, b)
    expected = scipy_stats.ttest_rel(a, b).confidence_interval(0.95)
    np.testing.assert_allclose((got.low, got.high), expected, rtol=1e-12)
    assert got.n == 7


def test_what_seeds_share_does_not_widen_the_interval(rng):
    a, b = rng.normal(size=(2, 6))
    shared = 1000 * rng.normal(size=6)
    plain, shifted = paired_difference(a, b), paired_difference(a + shared, b + shared)
    np.testing.assert_allclose((shifted.low, shifted.high), (plain.low, plain.high), rtol=1e-8)


def test_unmatched_samples_are_refused():
    with pytest.raises(ValueError, match="pair them by seed"):
        paired_difference([1.0, 2.0], [1.0])


def test_one_data_set_is_the_paired_difference(rng):
    a, b = rng.normal(size=(2, 5))
    strata, plain = stratified_difference([(a, b)]), paired_difference(a, b)
    np.testing.assert_allclose((strata.low, strata.high), (plain.low, plain.high), rtol=1e-12)


def test_two_data_sets_equal_welchs_interval(rng):
    # (d1 + d2) / 2 is half of the difference d1 - (-d2), for which scipy has Welch's interval
    first, second = rng.normal(1, 1, size=5), rng.normal(3, 4, size=9)
    got = stratified_difference([(first, np.zeros(5)), (second, np.zeros(9))])
    welch = scipy_stats.ttest_ind(first, -second, equal_var=False).confidence_interval(0.95)
    np.testing.assert_allclose((2 * got.low, 2 * got.high), welch, rtol=1e-12)
    assert got.n == 14


def test_data_sets_weigh_the_same_whatever_their_number_of_seeds():
    got = stratified_difference([([1.0, 1, 1, 1, 1, 1], np.zeros(6)), ([5.0, 5], np.zeros(2))])
    assert (got.low, got.estimate, got.high) == (3.0, 3.0, 3.0)


def test_a_data_set_with_one_pair_leaves_no_bounds_and_one_without_no_estimate():
    full = ([1.0, 2.0, 4.0], [0.0, 0.0, 0.0])
    one = stratified_difference([full, ([3.0], [0.0])])
    none = stratified_difference([full, ([], [])])
    assert (one.low, one.high, one.n) == (None, None, 4)
    assert one.estimate == pytest.approx((7 / 3 + 3) / 2)
    assert (none.estimate, none.low) == (None, None)
    assert stratified_difference([]).estimate is None


@pytest.mark.parametrize("n", [2, 5, 8, 12])
def test_sign_flip_equals_scipy_permutation_test(n, rng):
    a, b = rng.normal(0.4, 1, size=n), rng.normal(size=n)
    expected = scipy_stats.permutation_test(
        (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip_p_value([(a, b)], rng=rng) == pytest.approx(expected.pvalue, abs=1e-12)


def test_eight_pairs_of_one_sign_give_the_least_p(rng):
    assert sign_flip_p_value([(np.arange(1.0, 9.0), np.zeros(8))], rng=rng) == 2 / 256


def test_sign_flip_statistic_is_the_mean_over_data_sets(rng):
    # contributions 1/2, 1/2, 3: |sum| = 4 is reached by 2 of 8 patterns
    strata = [([1.0, 1.0], [0.0, 0.0]), ([3.0], [0.0])]
    assert sign_flip_p_value(strata, rng=rng) == 0.25


def test_drawn_patterns_agree_with_the_normal_limit(rng):
    d = rng.normal(0.3, 1, size=40)
    drawn = sign_flip_p_value([(d, np.zeros(40))], rng=rng)
    z = d.sum() / np.sqrt((d**2).sum())
    assert drawn == pytest.approx(2 * scipy_stats.norm.sf(abs(z)), abs=0.015)


def test_drawn_p_is_never_zero_and_repeats_with_its_rng():
    strata = [(np.ones(30), np.zeros(30))]
    first, second = (
        sign_flip_p_value(strata, rng=np.random.default_rng(3), resamples=99) for _ in range(2)
    )
    assert first == second == 1 / 100


def test_no_pairs_or_no_difference_is_no_evidence(rng):
    assert sign_flip_p_value([([], [])], rng=rng) == 1.0
    assert sign_flip_p_value([([2.0, 3.0], [2.0, 3.0])], rng=rng) == 1.0


def test_paired_mean_of_differences_is_the_mean():
    assert paired_difference([3.0, 5.0], [1.0, 1.0]) == mean([2.0, 4.0])
