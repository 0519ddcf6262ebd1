from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats import paired_improvement, probability_of_improvement

# rliable 1.2.0: metrics.probability_of_improvement(A[:, None], B[:, None]) and with A[:5]
A = np.array([71.2, 70.4, 72.9, 69.8, 73.5, 70.4, 74.1, 72.0])
B = np.array([70.4, 69.1, 71.2, 70.0, 72.9, 68.7, 73.0, 71.5])
RLIABLE, RLIABLE_UNEQUAL = 0.65625, 0.6125


def test_estimate_equals_rliable_with_ties_and_unequal_n():
    whole = probability_of_improvement(A, B, higher_is_better=True)
    part = probability_of_improvement(A[:5], B, higher_is_better=True)
    assert (whole.estimate, whole.n) == (RLIABLE, 8)
    assert (part.estimate, part.n) == (RLIABLE_UNEQUAL, 5)


def test_estimate_equals_mann_whitney():
    u = scipy_stats.mannwhitneyu(A, B).statistic
    assert probability_of_improvement(A, B, higher_is_better=True).estimate == u / 64


def test_bounds_lie_z_standard_deviations_away():
    got = probability_of_improvement(A, B[:6], higher_is_better=True, level=0.9)
    m, n = 8, 6
    for p in (got.low, got.high):
        q1, q2 = p / (2 - p), 2 * p**2 / (1 + p)  # Hanley and McNeil's, with both n at their mean
        variance = (p * (1 - p) + ((m + n) / 2 - 1) * (q1 + q2 - 2 * p**2)) / (m * n)
        distance = abs(got.estimate - p) / np.sqrt(variance)
        assert distance == pytest.approx(scipy_stats.norm.ppf(0.95), rel=1e-6)
    assert got.low < got.estimate < got.high


def test_swapped_samples_and_lower_is_better_mirror_the_interval():
    forward = probability_of_improvement(A, B, higher_is_better=True)
    swapped = probability_of_improvement(B, A, higher_is_better=True)
    lower = probability_of_improvement(A, B, higher_is_better=False)
    assert lower == swapped
    np.testing.assert_allclose((forward.low, forward.high), (1 - swapped.high, 1 - swapped.low))


def test_separated_samples_keep_a_sensible_interval():
    widths = []
    for n in (4, 5, 8, 20):
        got = probability_of_improvement(np.ones(n), np.zeros(n), higher_is_better=True)
        assert (got.estimate, got.high) == (1.0, 1.0)
        assert 0.5 < got.low < 1
        widths.append(got.high - got.low)
    assert widths == sorted(widths, reverse=True)


def test_identical_samples_are_a_tie():
    got = probability_of_improvement(np.zeros(5), np.zeros(5), higher_is_better=True)
    assert got.estimate == 0.5
    assert got.low == pytest.approx(1 - got.high)


@pytest.mark.parametrize(("m", "n", "bounded"), [(3, 3, False), (4, 4, True), (3, 5, True)])
def test_no_bounds_where_separation_happens_by_chance(m, n, bounded):
    got = probability_of_improvement(np.ones(m), np.zeros(n), higher_is_better=True)
    assert (got.low is not None) == bounded


def test_paired_bounds_equal_scipys_exact_interval():
    for wins in range(9):
        a = np.r_[np.ones(wins), -np.ones(8 - wins)]
        got = paired_improvement(a, np.zeros(8), higher_is_better=True)
        expected = scipy_stats.binomtest(wins, 8).proportion_ci(0.95, "exact")
        assert got.estimate == wins / 8
        np.testing.assert_allclose((got.low, got.high), expected, atol=1e-12)


def test_paired_ties_count_one_half():
    got = paired_improvement([1.0, 0.0, 2.0, 5.0], [1.0, 1.0, 1.0, 1.0], higher_is_better=True)
    assert got.estimate == 2.5 / 4
    lower = paired_improvement([1.0, 0.0, 2.0, 5.0], [1.0] * 4, higher_is_better=False)
    assert lower.estimate == 1.5 / 4


def test_five_pairs_never_exclude_one_half():
    assert paired_improvement(np.ones(5), np.zeros(5), higher_is_better=True).low < 0.5
    assert paired_improvement(np.ones(6), np.zeros(6), higher_is_better=True).low > 0.5


@pytest.mark.parametrize("statistic", [probability_of_improvement, paired_improvement])
def test_improvement_of_one_seed_has_no_interval_and_of_none_no_estimate(statistic):
    one = statistic([2.0], [1.0], higher_is_better=True)
    none = statistic([], [], higher_is_better=True)
    assert (one.estimate, one.low, one.high, one.n) == (1.0, None, None, 1)
    assert (none.estimate, none.low, none.high, none.n) == (None, None, None, 0)


def test_unmatched_pairs_are_refused():
    with pytest.raises(ValueError, match="pair them by seed"):
        paired_improvement([1.0], [1.0, 2.0], higher_is_better=True)
