"""Ratios of errors, alone and over workloads."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from normexp.stats.family import decide, difference
from normexp.stats.interval import Interval, as_ratio, log_outcomes, over_workloads


def accuracies(rng: np.random.Generator, level: float, shape: tuple[int, ...]) -> np.ndarray:
    return 100.0 * (rng.random(shape) < level)


def log_gap(first: np.ndarray, second: np.ndarray) -> Interval:
    return difference(log_outcomes(first), log_outcomes(second))


def test_a_ratio_of_errors_and_its_interval():
    rng = np.random.default_rng(0)
    first, second = accuracies(rng, 0.92, (8, 2500)), accuracies(rng, 0.96, (8, 2500))
    gap = log_gap(first, second)
    ratio = as_ratio(gap)
    expected = (100 - first.mean()) / (100 - second.mean())
    assert ratio.estimate == pytest.approx(expected)
    assert 1 < ratio.low < expected < ratio.high < 3
    assert decide(gap, margin=math.log(1.05), family_size=29) == "worse"


def test_values_of_a_logarithm_have_the_error_of_the_delta_method():
    rng = np.random.default_rng(1)
    outcomes = 90 + rng.normal(size=8)
    logs, error = log_outcomes(outcomes), 100 - outcomes.mean()
    assert logs.mean() == pytest.approx(-math.log(error))
    assert logs.std() == pytest.approx(outcomes.std() / error)
    assert log_outcomes(np.full((8, 359), 100.0)).mean() == pytest.approx(-math.log(100 / 359 / 2))


def test_the_mean_over_two_workloads_has_welchs_interval():
    rng = np.random.default_rng(2)
    pairs = [(90 + rng.normal(size=n), 91 + 3 * rng.normal(size=n)) for n in (4, 8)]
    got = over_workloads([log_gap(a, b) for a, b in pairs])
    first, second = (log_outcomes(a) - log_outcomes(b) for a, b in pairs)
    # (d1 + d2) / 2 is half of the difference d1 - (-d2), for which scipy has Welch's test
    welch = scipy_stats.ttest_ind(first, -second, equal_var=False).confidence_interval(0.95)
    assert got.estimate == pytest.approx((first.mean() + second.mean()) / 2)
    assert (got.low, got.high) == pytest.approx((welch.low / 2, welch.high / 2))


def test_over_workloads_the_interval_is_no_narrower_than_over_seeds():
    rng = np.random.default_rng(4)
    gaps = [
        log_gap(accuracies(rng, p, (4, 400)), accuracies(rng, 0.9, (4, 400))) for p in (0.9, 0.8)
    ]
    both = over_workloads(gaps)
    df, error = both.over_seeds
    alone = [gap.over_seeds[1] for gap in gaps]
    assert error == pytest.approx(math.hypot(*alone) / 2) and 3 <= df <= 6
    assert both.low < both.estimate - 2.4 * error
    assert over_workloads([gaps[0], difference([1.0], [2.0])]).low is None
