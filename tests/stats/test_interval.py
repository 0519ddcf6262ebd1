from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats.interval import Interval, as_sample, t_interval


def test_t_interval_equals_scipy():
    got = t_interval(2.0, 0.3, 4.5, level=0.9, n=6, method="t")
    expected = scipy_stats.t.interval(0.9, 4.5, loc=2.0, scale=0.3)
    np.testing.assert_allclose((got.low, got.high), expected, rtol=1e-12)


def test_no_degrees_of_freedom_means_no_bounds():
    got = t_interval(2.0, 0.3, 0, level=0.95, n=1, method="t")
    assert (got.estimate, got.low, got.high) == (2.0, None, None)


@pytest.mark.parametrize(("n", "bounded"), [(2, False), (5, False), (6, True)])
def test_few_equal_values_have_no_bounds(n, bounded):
    for error in (0.0, 1e-16):  # floats that stand for equal values differ in their last digits
        got = t_interval(0.3, error, n - 1, level=0.95, n=n, method="t")
        assert (got.low is not None) is bounded
    zero = t_interval(0.0, 0.0, n - 1, level=0.95, n=n, method="t")
    assert (zero.low, zero.high) == (0.0, 0.0)


def test_a_single_bound_is_refused():
    with pytest.raises(ValueError, match="both bounds or neither"):
        Interval(1.0, 0.0, None, 0.95, 3, "t")


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_level_must_be_a_probability(level):
    with pytest.raises(ValueError, match="level="):
        Interval(1.0, 0.0, 2.0, level, 3, "t")


@pytest.mark.parametrize("values", [[1.0, np.nan], [np.inf, 1.0], [[1.0, 2.0]]])
def test_missing_values_and_tables_are_no_sample(values):
    with pytest.raises(ValueError, match="leave missing|one-dimensional"):
        as_sample(values)
