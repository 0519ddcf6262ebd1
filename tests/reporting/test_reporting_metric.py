"""Numbers as text, and what metrics are called."""

from __future__ import annotations

import math

import pytest

from normexp.reporting.metric import describe_metric, format_interval, format_signed
from normexp.stats.interval import Interval


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate, low, high, 0.95, 8)


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
    assert format_interval(Interval(1.23, None, None, 0.95, 1), 1) == "1.2"
    assert format_interval(Interval(None, None, None, 0.95, 0), 1) == "-"


def test_signs():
    assert [format_signed(x, 1) for x in (1.0, -0.04, -1.0)] == ["+1.0", "+0.0", "-1.0"]
    assert -interval(1.0, 0.5, 2.0) == interval(-1.0, -2.0, -0.5)


@pytest.mark.parametrize(
    ("name", "label", "higher", "selection"),
    [
        ("test/accuracy", "test accuracy (%)", True, "val/accuracy"),
        ("test/loss@precise", "test loss (nats), precise statistics", False, "val/loss"),
        ("val/bits_per_byte", "val bits per byte", False, "val/bits_per_byte"),
        ("test/f1", "test f1", True, "val/f1"),
    ],
)
def test_metrics_are_described_by_their_name(name: str, label: str, higher: bool, selection: str):
    metric = describe_metric(name)
    assert (metric.label, metric.higher_is_better) == (label, higher)
    assert metric.selection_name == selection
    assert describe_metric(name, 0.3).tolerance == 0.3


@pytest.mark.parametrize(
    ("name", "bounds", "limit"),
    [("test/accuracy", (0.0, 100.0), 100.0), ("test/loss", None, math.inf)],
)
def test_an_accuracy_has_bounds(name: str, bounds: tuple[float, float] | None, limit: float):
    metric = describe_metric(name)
    assert (metric.bounds, metric.limit) == (bounds, limit)
