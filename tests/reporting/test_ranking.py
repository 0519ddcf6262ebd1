"""One ranking, of a slice and over several workloads."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_study import cell_of, report_of_cells

RNG = np.random.default_rng(5)


def draw(mean: float, spread: float = 0.002) -> list[float]:
    return (mean + spread * RNG.normal(size=8)).tolist()


def test_norms_stand_in_order_of_their_estimate_with_marks_and_verdicts():
    means = {"batch": 0.9, "layer": 0.93, "group": 0.931, "rms": 0.85}
    report = report_of_cells(*(cell_of(norm, draw(mean)) for norm, mean in means.items()))
    assert report.over_slices is None  # of one workload
    (ranking,) = report.rankings
    assert ranking.reference == "batch" and set(ranking.best) == {"layer", "group"}
    estimates = [place.value.estimate for place in ranking.places]
    assert estimates == sorted(estimates, reverse=True)
    verdicts = {place.norm: place.verdict for place in ranking.places}
    assert verdicts == {"layer": "better", "group": "better", "batch": None, "rms": "worse"}
    # three against the reference; layer, group and rms with each other are one more
    assert ranking.family_size == 4


def test_equal_norms_all_may_be_the_best_and_one_that_cannot_be_compared_stands_last():
    cells = [cell_of(norm, draw(0.9, 0.01)) for norm in ("batch", "layer", "group")]
    (ranking,) = report_of_cells(*cells, cell_of("rms", draw(0.99), epochs=9)).rankings
    assert sorted(ranking.best) == ["batch", "group", "layer"]
    last = ranking.places[-1]
    assert (last.norm, last.may_be_best, last.gap) == ("rms", None, None)
    assert last.why == "not compared: epochs 9 and 3"


def test_over_workloads_ratios_of_errors_are_averaged():
    errors = {"easy": (0.01, 0.005), "hard": (0.4, 0.2)}  # group has half the error of batch
    cells = [
        cell_of(norm, draw(1 - error, 0.05 * error), data=data)
        for data, pair in errors.items()
        for norm, error in zip(("batch", "group"), pair, strict=True)
    ]
    overall = report_of_cells(*cells).over_slices
    assert overall is not None and overall.best == ["group"]
    first, second = overall.places
    assert (first.norm, first.verdict, second.norm) == ("group", "better", "batch")
    assert np.exp(-first.gap.estimate) == pytest.approx(0.5, rel=0.05)
    (table,) = [table for table in report_of_cells(*cells).tables if table.name == "ranking"]
    assert table.frame["ratio [95 %]"][0].startswith("0.5")
