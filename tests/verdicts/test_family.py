"""The family of verdicts: decisions, and the number of seeds that they take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.verdicts.family import decide, difference, least_decided, p_value, tie_p
from normexp.verdicts.interval import Interval, mean, t_interval


def member(estimate: float, error: float = 0.1, n: int = 8) -> Interval:
    return t_interval(estimate, error, n - 1, n=n)


@pytest.mark.parametrize(
    ("gap", "margin", "family_size", "expected"),
    [
        (member(1.5), 1.0, 1, "better"),
        (member(-1.5), 1.0, 1, "worse"),
        (member(0.5), 1.0, 1, "better"),  # shown before it is said to be within
        (member(0.1), 1.0, 1, "tie"),
        (member(0.1, 0.45), 1.0, 1, "undecided"),  # its 95 % interval reaches beyond the margin
        (member(0.7), 1.0, 10, "better"),
        (member(0.3), 1.0, 1, "better"),
        (member(0.3), 1.0, 10, "tie"),  # ten times the p
        (member(0.3), 1.0, 1000, "undecided"),
        (member(0.0), 0.0, 1, "undecided"),
        (mean([1.0]), 1.0, 1, "undecided"),
        (mean([]), 1.0, 1, "undecided"),
    ],
)
def test_verdicts(gap, margin, family_size, expected):
    assert decide(gap, margin=margin, family_size=family_size) == expected


@pytest.mark.parametrize("truth", [0.0, 0.5, 1.0, -1.0, 3.0])
@pytest.mark.parametrize("error", [0.05, 0.26, 0.5, 2.0])
def test_one_member_errs_in_at_most_its_level_whatever_the_truth(truth, error):
    """All three sentences share one level: family of 2, so 2.5 %.

    Over equally likely values of the mean's error and of its estimated variance.
    """
    middles = (np.arange(64) + 0.5) / 64
    noise, chi = np.meshgrid(scipy_stats.norm.ppf(middles), scipy_stats.chi2.ppf(middles, 7))
    wrong = {"tie"} if abs(truth) >= 1 else set()
    wrong |= ({"better"} if truth <= 0 else set()) | ({"worse"} if truth >= 0 else set())
    found = [
        decide(member(truth + error * z, error * np.sqrt(c / 7)), margin=1.0, family_size=2)
        for z, c in zip(noise.flat, chi.flat, strict=True)
    ]
    assert np.mean([one in wrong for one in found]) <= 0.025 + 0.0025


def test_a_difference_is_unpaired_and_its_tests_are_those_of_scipy():
    rng = np.random.default_rng(2)
    a, b = rng.normal(0.5, 1, 8), rng.normal(0, 2, 5)
    got, test = difference(a, b), scipy_stats.ttest_ind(a, b, equal_var=False)
    assert (got.low, got.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert p_value(got) == pytest.approx(test.pvalue) and got.n == 5
    options = {"equal_var": False}
    lower = scipy_stats.ttest_ind(a + 1, b, alternative="greater", **options).pvalue
    upper = scipy_stats.ttest_ind(a - 1, b, alternative="less", **options).pvalue
    assert tie_p(got, 1.0) == pytest.approx(max(lower, upper))
    assert (difference([90.0, 12.0], [3.0, 8.0], limit=100).high) == 100
    with pytest.raises(ValueError, match="test samples must be the same"):
        difference(np.ones((4, 3)), np.ones((4, 2)))


def test_only_a_t_interval_has_a_p():
    with pytest.raises(ValueError, match="t interval"):
        p_value(Interval(0.5, 0.2, 0.8, 8))
    assert p_value(Interval(0.5, None, None, 1)) == 1


def test_a_verdict_over_test_samples_holds_over_seeds_alone_too():
    # At 95 % the interval over both is wider; far out the seeds' 2 degrees of freedom decide.
    alone = (2.0, 0.1)
    both = Interval(1.0, 0.7, 1.3, 3, df=100.0, error=0.13, further=(alone,))
    assert p_value(both) == pytest.approx(2 * scipy_stats.t.sf(1 / 0.1, 2))
    assert tie_p(both, 2.0) == pytest.approx(scipy_stats.t.sf(1 / 0.1, 2))


@pytest.mark.parametrize("family_size", [1, 5])
def test_the_smallest_decided_difference_is_where_the_verdict_turns(family_size: int):
    gap = Interval(0.5, -1.0, 2.0, n=6, df=5, error=0.6, further=((4, 0.55),))
    least = least_decided(gap, family_size=family_size)
    assert least is not None
    for factor, verdict in ((1.001, "better"), (0.999, "undecided")):
        shifted = replace(gap, estimate=factor * least)
        assert decide(shifted, margin=0.0, family_size=family_size) == verdict
