"""The tuning curve: the formula against all draws, divergence, and the figure of a report."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import vl_convert
from synthetic_study import write_cell

from normexp.records.history import SearchEntry, append_entries
from normexp.reporting.tuning import bootstrap_band, draw_tuning, expected_best, read_curves


def mean_over_all_draws(scores: np.ndarray, values: np.ndarray, k: int) -> float:
    bests = [max(draw, key=lambda i: scores[i]) for draw in itertools.combinations(range(7), k)]
    return float(np.mean([values[best] for best in bests]))


@pytest.mark.parametrize("k", range(1, 8))
def test_it_is_the_mean_over_all_draws_of_the_value_at_the_best_score(k: int):
    rng = np.random.default_rng(3)
    scores, values = rng.normal(size=(2, 7))
    expected = mean_over_all_draws(scores, values, k)
    assert expected_best(scores, values)[k - 1] == pytest.approx(expected, abs=1e-12)


def test_points_of_equal_scores_count_with_their_mean():
    scores, values = np.array([1.0, 2.0, 2.0]), np.array([0.0, 4.0, 8.0])
    # k = 2: one of the equal points in two of three draws, both in the third
    assert expected_best(scores, values) == pytest.approx([4, 6, 6])


def test_many_points_neither_overflow_nor_leave_the_range_of_values():
    values = np.linspace(0, 1, 1500)
    curve = expected_best(values, values)
    assert curve[0] == pytest.approx(0.5) and curve[-1] == pytest.approx(1)
    assert (np.diff(curve) > -1e-9).all()


def test_loss_that_diverged_counts_until_a_draw_must_hold_another_point():
    scores = np.array([-math.inf, -0.2, -0.3])
    assert expected_best(scores, -scores).tolist() == pytest.approx([math.inf, 0.7 / 3, 0.2])


@pytest.mark.slow
def test_band_covers_the_expected_best_of_the_distribution_that_points_come_from():
    """E[max of 3 uniform values] = 3/4; a percentile bootstrap of 20 points is a little narrow."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(30):
        points = rng.random(20)
        low, high = bootstrap_band(points, points, rng)
        hits += low[2] <= 0.75 <= high[2]
    assert 25 <= hits < 30


def write_search(root: Path, norm: str, accuracies: list[float | None]) -> None:
    points = [
        write_cell(
            root, norm, {1000: accuracy, 1001: accuracy}, study="synthetic-search", lr=lr
        ).name
        for lr, accuracy in enumerate(accuracies, start=1)
    ]
    entry = SearchEntry(
        f"norm={norm}", [f"norm={norm}", "epochs=3"], ["lr"], "val/accuracy", points
    )
    append_entries(root / "synthetic-search", [entry])


def test_report_of_a_study_draws_the_search_that_chose_for_it(tmp_path: Path):
    write_search(tmp_path, "batch", [0.5, 0.8, None])
    write_search(tmp_path, "group", [0.6, 0.7])
    (figure,) = draw_tuning([tmp_path / "synthetic-search"])
    rows = {(row["norm"], row["k"]): row["mean"] for row in figure.spec["datasets"]["rows"]}
    batch = [curve for curve in read_curves(tmp_path / "synthetic-search") if curve.norm == "batch"]
    best, middle = sorted(100 * batch[0].values, reverse=True)[:2]
    assert rows["batch", 3] == pytest.approx(best)
    assert rows["batch", 2] == pytest.approx((2 * best + middle) / 3)
    assert rows["batch", 1] == pytest.approx((best + middle + 0) / 3)
    assert set(rows) == {*(("batch", k) for k in (1, 2, 3)), ("group", 1), ("group", 2)}
    assert figure.spec["title"]["subtitle"] == "epochs=3" and "validation" not in figure.title
    svg = vl_convert.vegalite_to_svg(json.dumps(figure.spec))
    assert "<path" in svg and [svg.count(f">{k}</text>") for k in (1, 2, 3)] == [1, 1, 1]


def test_study_without_a_search_has_no_curve(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.8})
    assert read_curves(tmp_path / "synthetic") == read_curves(tmp_path / "missing") == []
