"""Ratios of errors, alone and over workloads."""

from __future__ import annotations

import math

import numpy as np
import pytest

from normexp.stats.contrast import verdict_on
from normexp.stats.interval import stratified_mean
from normexp.stats.ratio import as_ratio, error_ratio, log_outcomes, over_workloads


def accuracies(rng: np.random.Generator, level: float, shape: tuple[int, ...]) -> np.ndarray:
    return 100.0 * (rng.random(shape) < level)


def test_a_ratio_of_errors_and_its_interval():
    rng = np.random.default_rng(0)
    first, second = accuracies(rng, 0.92, (8, 2500)), accuracies(rng, 0.96, (8, 2500))
    assessment = error_ratio(first, second)
    ratio = as_ratio(assessment.gap)
    expected = (100 - first.mean()) / (100 - second.mean())
    assert ratio.estimate == pytest.approx(expected)
    assert 1 < ratio.low < expected < ratio.high < 3
    assert verdict_on(assessment, 29)[0] == "below"


def test_values_of_a_logarithm_have_the_error_of_the_delta_method():
    rng = np.random.default_rng(1)
    outcomes = 90 + rng.normal(size=8)
    logs, error = log_outcomes(outcomes), 100 - outcomes.mean()
    assert logs.mean() == pytest.approx(-math.log(error))
    assert logs.std() == pytest.approx(outcomes.std() / error)


def test_without_any_error_a_ratio_has_a_wide_interval():
    perfect = np.full((8, 359), 100.0)
    ratio = as_ratio(error_ratio(perfect, perfect).gap)
    assert ratio.estimate == 1 and ratio.low < 0.1 and ratio.high > 10


def test_the_mean_over_workloads_is_that_of_independent_strata():
    rng = np.random.default_rng(2)
    pairs = [(90 + rng.normal(size=n), 91 + 3 * rng.normal(size=n)) for n in (4, 8)]
    ratios = [error_ratio(a, b, margin=math.log(1.1)) for a, b in pairs]
    got = over_workloads(ratios)
    expected = stratified_mean([log_outcomes(a) - log_outcomes(b) for a, b in pairs])
    assert got.gap.estimate == pytest.approx(expected.estimate)
    assert (got.gap.low, got.gap.high) == pytest.approx((expected.low, expected.high))
    assert got.gap.df == pytest.approx(expected.df)
    centre = got.gap.estimate
    assert [one.estimate for one in got.distances] == pytest.approx(
        [math.log(1.1) - centre, math.log(1.1) + centre]
    )


def test_over_workloads_seeds_that_lie_apart_withhold_a_verdict():
    rng = np.random.default_rng(3)
    first, second = 90 + 0.1 * rng.normal(size=(2, 8))
    first[0] -= 60  # alone it makes the first norm worse
    lost, equal = error_ratio(first, second), error_ratio(second, second + 0.1)
    both = over_workloads([lost, equal])
    assert lost.num_apart and both.num_apart == lost.num_apart + equal.num_apart
    assert abs(both.without_apart.gap.estimate) < abs(both.gap.estimate)


def test_over_workloads_the_interval_is_no_narrower_than_over_seeds():
    rng = np.random.default_rng(4)
    ratios = [
        error_ratio(accuracies(rng, p, (4, 400)), accuracies(rng, 0.9, (4, 400)))
        for p in (0.9, 0.8)
    ]
    both, alone = over_workloads(ratios).gap, [ratio.gap.over_seeds for ratio in ratios]
    df, error = both.over_seeds
    assert error == pytest.approx(math.hypot(*(e for _, e in alone)) / 2) and 3 <= df <= 6
    assert both.low < both.estimate - 2.4 * error
