"""Differences, their margins and their verdicts, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from normexp.stats.contrast import Margin, change, difference, state_of_seeds, verdict_on
from normexp.stats.interval import crossed_mean, mean

NOISE = np.array([0.2, -0.1, 0.1, -0.2, 0.0, 0.15, -0.15, 0.05])


def test_the_margin_is_a_quarter_of_the_reference_error_with_its_noise():
    reference = 98 + 4 * NOISE
    first = reference + np.array([0.1, -0.1, 0.0, 0.05, -0.05, 0.1, 0.0, -0.1])
    got = difference(first, reference, Margin(cap=1.0, share=0.25))
    gap, error = first - reference, (100 - reference) / 4
    expected = [mean(1 - gap), mean(1 + gap), mean(error - gap), mean(error + gap)]
    for one, by_hand in zip(got.distances, expected, strict=True):
        assert (one.estimate, one.error) == pytest.approx((by_hand.estimate, by_hand.error))
        assert (one.low, one.high) == pytest.approx((by_hand.low, by_hand.high))
    assert verdict_on(got, 7) == ("within", False)


@pytest.mark.parametrize(
    ("level", "expected"),
    [(96.0, "within"), (99.1, "open")],  # margins of 1 and of 0.225 points
)
def test_half_a_point_is_small_only_beside_a_large_error(level, expected):
    reference = np.full(8, level)
    got = difference(reference + NOISE[::-1] + 0.08, reference, Margin(cap=1.0, share=0.25))
    assert verdict_on(got, 7)[0] == expected


def test_a_margin_without_a_share_is_constant():
    got = difference(NOISE, NOISE * 0, Margin(cap=0.5))
    assert [one.estimate for one in got.distances] == pytest.approx(
        [0.5 - NOISE.mean(), 0.5 + NOISE.mean()]
    )


def test_tables_are_judged_over_seeds_and_samples():
    rng = np.random.default_rng(0)
    a, b = 100.0 * (rng.random((2, 8, 300)) < 0.9)
    got = difference(a, b, Margin(cap=1.0), step=1 / 3)
    assert got.gap == crossed_mean(a - b, step=1 / 3)
    with pytest.raises(ValueError, match="pair outcomes"):
        difference(a, b[:, :200], Margin(cap=1.0))


@pytest.mark.parametrize(
    ("moves", "verdict"), [(0.0, "within"), (0.9, "above"), (-3.0, "below"), (0.1, "within")]
)
def test_a_change_between_budgets_is_the_difference_of_differences(moves, verdict):
    zero = np.zeros(8)
    got = change((NOISE, zero), (NOISE[::-1] + moves, zero), Margin(cap=1.0))
    assert got.gap.estimate == pytest.approx(moves)
    assert got.gap.error == pytest.approx(mean(NOISE[::-1] - NOISE).error)
    assert verdict_on(got, 4)[0] == verdict


def test_a_verdict_that_seeds_apart_change_is_withheld():
    values = 1.0 + NOISE
    assert verdict_on(difference(values, 0 * values, Margin(cap=0.5)), 1) == ("above", False)
    values[3] = -9.0
    one = difference(values, 0 * values, Margin(cap=0.5))
    assert (one.num_apart, one.gap.n, one.without_apart.gap.n) == (1, 8, 7)
    assert verdict_on(one, 1) == ("open", True)
    values[3] = 4.0  # the same verdict with and without
    assert verdict_on(difference(values, 0 * values, Margin(cap=0.5)), 1) == ("above", False)


@pytest.mark.parametrize(
    ("recorded", "state"), [(0, "incomplete"), (7, "incomplete"), (8, "complete"), (9, "extended")]
)
def test_only_the_declared_seeds_are_judged(recorded, state):
    assert state_of_seeds(recorded, declared=8) == state
