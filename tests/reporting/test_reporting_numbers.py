"""Numbers as text, and the p that belongs to an interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_rel

from normexp.reporting.numbers import format_interval, negated, p_value_of
from normexp.stats import Interval, paired_difference


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate, low, high, 0.95, 8, "t")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.21, 0.6, 1.9), "1.2 [0.6, 1.9]"),
        ((0.1, 0.05, 0.15), "0.10 [0.05, 0.15]"),
        ((0.8, 0.03, 1.6), "0.80 [0.03, 1.60]"),  # a bound off 0 is not shown as 0
        ((0.0, -0.01, 0.01), "0.00 [-0.01, 0.01]"),
        ((-0.01, -1.0, 0.98), "0.0 [-1.0, 1.0]"),
        ((1.2, 1.2, 1.2), "1.2 [1.2, 1.2]"),
        ((1.2, 1.2 - 1e-14, 1.2), "1.2 [1.2, 1.2]"),
    ],
)
def test_digits_follow_the_width_of_the_interval(values: tuple[float, float, float], text: str):
    assert format_interval(interval(*values), 1) == text


def test_no_bounds_are_made_up():
    assert format_interval(Interval(1.23, None, None, 0.95, 1, "t"), 1) == "1.2"
    assert format_interval(Interval(None, None, None, 0.95, 0, "t"), 1) == "-"


def test_negated_swaps_the_bounds():
    assert negated(interval(1.0, 0.5, 2.0)) == interval(-1.0, -2.0, -0.5)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_p_value_is_that_of_the_paired_t_test(n: int):
    rng = np.random.default_rng(n)
    a, b = rng.normal(0.5, 1, n), rng.normal(0, 1, n)
    assert p_value_of(paired_difference(a, b)) == pytest.approx(ttest_rel(a, b).pvalue)


def test_p_value_without_spread_or_without_interval():
    assert p_value_of(interval(0.0, 0.0, 0.0)) == 1
    assert p_value_of(interval(1.0, 1.0, 1.0)) == 0
    assert p_value_of(Interval(1.0, None, None, 0.95, 1, "t")) == 1
