"""Figures: what their rows hold, and that each specification draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import vl_convert
from synthetic_study import make_runs, make_study, study_of, write_study

from normexp.reporting.cells import build_cells
from normexp.reporting.curves import draw_curves
from normexp.reporting.figures import Figure, draw_metric
from normexp.reporting.groups import draw_groups
from normexp.reporting.learning_rates import draw_learning_rates, draw_rate_map
from normexp.reporting.matrices import draw_heat_map, draw_improvement
from normexp.reporting.report import build_report
from normexp.reporting.runs import Run
from normexp.reporting.slices import Slice, build_slices
from normexp.reporting.statistics import draw_statistics
from normexp.reporting.style import Style, assign_styles
from normexp.reporting.throughput import draw_memory, draw_throughput


def prepare(runs: list[Run]) -> tuple[Slice, dict[str, Style]]:
    cells = build_cells([study_of(runs)])
    part = build_slices(cells, metric=None, tolerance=None)[0]
    return part, assign_styles(cell.norm for cell in cells)


def svg_of(figure: Figure | None) -> str:
    assert figure is not None
    return vl_convert.vegalite_to_svg(json.dumps(figure.spec))


def test_rows_of_an_independent_norm_show_their_interval_once():
    figure = draw_metric(*prepare(make_study(np.random.default_rng(0))))
    assert figure is not None
    rows = [row for row in figure.rows if row["norm"] == "group"]
    assert len(rows) == 4 and len({row["mean"] for row in rows}) == 1
    assert [row["size"] for row in rows if row["shown"]] == [128]


def test_every_point_has_its_n_and_what_diverged():
    runs = make_runs("batch", {0: 0.8, 1: None, 2: 0.9}, norm_batch_size=2)
    runs += make_runs("batch", dict.fromkeys(range(4), 0.9), norm_batch_size=8)
    figure = draw_metric(*prepare(runs))
    assert figure is not None
    assert [row["count"] for row in figure.rows] == ["2/4 ×1 ?1", "4"]
    svg = svg_of(figure)
    assert "2/4 ×1 ?1" in svg and "test accuracy (%)" in svg and "norm batch size" in svg


def test_one_seed_has_no_bar():
    figure = draw_metric(*prepare(make_runs("batch", {0: 0.8}, norm_batch_size=2)))
    assert figure is not None
    assert [(row["low"], row["high"], row["n"]) for row in figure.rows] == [(None, None, 1)]


def test_an_axis_of_accuracy_ends_where_accuracies_end():
    def scale_of(low: float, high: float) -> dict[str, object]:
        figure = draw_metric(*prepare(make_runs("batch", {0: low, 1: high}, norm_batch_size=2)))
        assert figure is not None
        return figure.spec["vconcat"][0]["layer"][0]["encoding"]["y"]["scale"]

    wide = {"zero": False, "clamp": True, "domainMin": 0, "domainMax": 100}
    assert scale_of(0.3, 0.9) == wide  # the interval of two seeds goes far beyond
    assert scale_of(0.90, 0.901) == {"zero": False}


def test_heat_map_marks_a_cell_without_any_finished_seed():
    runs = make_runs("batch", {0: None, 1: None}, norm_batch_size=2)
    runs += make_runs("batch", {0: 0.8, 1: 0.9}, norm_batch_size=8)
    figure = draw_heat_map(prepare(runs)[0])
    assert figure is not None and [row["value"] for row in figure.rows] == ["×2", "85.0"]
    assert "×2" in svg_of(figure)


def test_improvement_of_a_over_b_and_b_over_a_are_complements():
    figure = draw_improvement(prepare(make_study(np.random.default_rng(0)))[0])
    assert figure is not None
    found = {(row["norm"], row["other"]): row["probability"] for row in figure.rows}
    assert all(p + found[b, a] == pytest.approx(1) for (a, b), p in found.items())
    assert found["group", "batch"] == 1


def test_evaluation_statistics_are_those_of_norms_that_have_them():
    figure = draw_statistics(prepare(make_study(np.random.default_rng(0)))[0])
    assert figure is not None and {row["norm"] for row in figure.rows} == {"batch"}
    assert {row["statistics"] for row in figure.rows} == {"running", "precise", "batch32"}
    assert "batch32" in svg_of(figure)


def test_batches_as_large_as_in_training_are_one_line():
    def runs(size: int, *suffixes: int) -> list[Run]:
        metrics = {"test/accuracy": 0.9} | {f"test/accuracy@batch{n}": 0.8 for n in suffixes}
        return make_runs("batch", {0: 0.9}, norm_batch_size=size, metrics=metrics)

    def kinds(found: list[Run]) -> set[str]:
        figure = draw_statistics(prepare(found)[0])
        assert figure is not None
        return {row["statistics"] for row in figure.rows}

    assert kinds(runs(2, 2) + runs(8, 8)) == {"running", "batch"}
    assert kinds(runs(2, 2, 8) + runs(8, 2, 8)) == {"running", "batch2", "batch8"}


def test_one_pair_has_no_probability_of_improvement():
    runs = make_runs("batch", {0: 0.8, 1: 0.9}) + make_runs("group", {0: 0.9})
    assert draw_improvement(prepare(runs)[0]) is None


def test_learning_rates_mark_the_chosen_one():
    runs = [
        run
        for size in (8, 32)
        for lr, accuracy in ((0.1, 0.8), (0.01, 0.7))
        for run in make_runs("batch", {0: accuracy}, batch_size=size, lr=lr)
    ]
    figure = draw_learning_rates(*prepare(runs))
    assert figure is not None
    assert {(row["lr"], row["chosen"]) for row in figure.rows} == {(0.1, True), (0.01, False)}
    svg_of(figure)
    squares = draw_rate_map(prepare(runs)[0])
    assert squares is not None
    assert {(row["lr"], row["value"]) for row in squares.rows} == {(0.1, "79.5"), (0.01, "69.5")}
    assert "69.5" in svg_of(squares)


def test_memory_is_drawn_where_a_gpu_recorded_it():
    runs = make_runs("batch", {0: 0.8}) + make_runs("group", {0: 0.8})
    assert draw_memory(*prepare(runs)) is None
    timing = {**runs[0].result.timing, "peak_memory_mb": 812.5}
    runs[0] = replace(runs[0], result=replace(runs[0].result, timing=timing))
    figure = draw_memory(*prepare(runs))
    assert figure is not None
    assert [(row["norm"], row["peak_memory_mb"]) for row in figure.rows] == [("batch", 812.5)]
    assert "peak GPU memory" in svg_of(figure)


def test_groups_sweep_has_layer_and_instance_as_levels():
    runs = [
        run
        for groups in (1, 4, 16)
        for run in make_runs("group", {0: 0.8, 1: 0.81}, knobs={"num_groups": groups})
    ]
    runs += make_runs("layer", {0: 0.8, 1: 0.81}) + make_runs("instance", {0: 0.7, 1: 0.71})
    figure = draw_groups(*prepare(runs))
    assert figure is not None
    assert [row["groups"] for row in figure.rows] == [1, 4, 16, None, None]
    svg_of(figure)


def test_figures_without_data_are_left_out():
    part, styles = prepare(make_runs("batch", {0: None, 1: None}, norm_batch_size=2))
    assert [draw(part) for draw in (draw_heat_map, draw_improvement, draw_statistics)] == [None] * 3
    styled = (draw_metric, draw_learning_rates, draw_groups)
    assert [draw(part, styles) for draw in styled] == [None] * 3
    assert draw_throughput(part, styles) is not None


def test_curves_have_means_over_seeds_and_few_points(tmp_path: Path):
    write_study(tmp_path, np.random.default_rng(0))
    report = build_report(tmp_path, ["synthetic"], metric=None, tolerance=None)
    figures = {figure.name: figure for figure in report.sections[0].figures}
    curve = figures["curves_train_loss_main"]
    rows = [row for row in curve.rows if row["norm"] == "batch" and row["size"] == 2]
    assert [row["samples"] for row in rows] == [128 * step for step in range(20, 201, 20)]
    assert {row["n"] for row in rows} == {8}
    svg_of(curve)
    sites = figures["sites_output_rms_main"]
    values = [row["value"] for row in sites.rows if row["norm"] == "batch"]
    assert values == pytest.approx([1, 1.1, 1.2, 1.3])
    svg_of(sites)


def test_one_validation_is_no_curve_and_a_leaking_training_loss_says_so():
    runs = make_runs("batch", {0: 0.8, 1: 0.9}, leaks_future_in_training=True)
    part, styles = prepare(runs + make_runs("layer", {0: 0.8, 1: 0.9}))
    points = {32: [2.0, 2.1], 64: [1.0, 1.1]}
    history = {"train/loss": points, "val/accuracy": {64: [0.5, 0.6]}}
    (figure,) = draw_curves(part, styles, {cell.id: history for cell in part.cells})
    assert figure.name == "curves_train_loss_main"
    assert "Not comparable: batch. In training a later position moves" in figure.caption
