"""Figures: what their rows hold, that each draws, and that norms look the same everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert
from synthetic_study import TIMING, declare, slices_of, write_cell, write_study

from normexp.reporting.charts import Figure
from normexp.reporting.figures import draw_figures
from normexp.reporting.style import ORDER, SLOTS, assign_styles, order_norms


def figures_of(root: Path) -> dict[str, Figure]:
    """The figures of the only slice by name."""
    (part,) = slices_of(root)
    found = draw_figures(part, assign_styles(part.norms))
    return {figure.name.removesuffix("_main"): figure for figure in found}


def rows_of(figure: Figure) -> list[dict[str, Any]]:
    return figure.spec["datasets"]["rows"]


def svg_of(figure: Figure) -> str:
    return vl_convert.vegalite_to_svg(json.dumps(figure.spec, allow_nan=False))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    """Those of the synthetic study."""
    root = tmp_path_factory.mktemp("runs")
    write_study(root, np.random.default_rng(0))
    return figures_of(root)


def test_a_study_has_its_figures_and_all_draw(figures: dict[str, Figure]):
    assert list(figures) == [
        *("metric_by_size", "evaluation_statistics"),
        *("curves_train_loss", "curves_val_accuracy", "sites_output_rms", "throughput"),
    ]
    for figure in figures.values():
        svg = svg_of(figure)
        assert figure.title in svg and "<path" in svg


@pytest.mark.slow
def test_the_paper_has_figures_without_titles_and_strip(figures: dict[str, Figure]):
    for figure in figures.values():
        bare = vl_convert.vegalite_to_svg(json.dumps(figure.for_paper))
        texts = [text.strip() for text in re.findall(r">([^<>]+)<", bare)]
        assert texts and figure.title not in texts and "seeds" not in texts
    assert ">seeds<" in svg_of(figures["metric_by_size"])


def test_norms_at_one_size_are_a_list_of_points_whose_caption_has_the_rates(tmp_path: Path):
    levels = {"batch": 0.95, "group": 0.948, "layer": 0.94, "none": 0.12}
    for norm, level in levels.items():
        lr = 0.3 if norm == "group" else 0.1
        write_cell(tmp_path, norm, {0: level, 1: level + 0.002, 2: None}, lr=lr)
    figures = figures_of(tmp_path)
    assert "heat_map" not in figures
    figure = figures["metric_by_size"]
    assert "Learning rates: batch 0.1; layer 0.1; group 0.3; none 0.1." in figure.caption
    assert "batch 2/3 ×1" in figure.caption and "Beyond the scale: none 12.1." in figure.caption
    assert figure.title in svg_of(figure)


def test_figures_without_data_are_left_out(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: None, 1: None}, norm_batch_size=2)
    assert list(figures_of(tmp_path)) == ["throughput"]


# The metric against the size


def test_every_point_and_square_has_its_n_and_what_diverged(tmp_path: Path):
    for size, values in ((2, {0: 0.8, 1: None, 2: 0.9}), (8, {0: 0.8}), (32, {0: None, 1: None})):
        for norm in ("batch", "batch_renorm"):
            write_cell(tmp_path, norm, values, norm_batch_size=size, mixes_samples=True)
    declare(tmp_path, "synthetic", count=3)
    figures = figures_of(tmp_path)
    points, squares = (rows_of(figures[name])[:3] for name in ("metric_by_size", "heat_map"))
    assert [row["count"] for row in points] == ["2/3 ×1", "1/3 ?2", "0/3 ×2 ?1"]
    assert [row["low"] is None for row in points] == [False, True, True]  # one seed has no bar
    assert [row["value"] for row in squares] == ["85.0", "80.0", "×2"]
    for name in ("metric_by_size", "heat_map"):
        assert "2/3 ×1" in svg_of(figures[name])


def write_levels(root: Path, levels: dict[str, float]) -> None:
    for norm, level in levels.items():
        for size in (2, 8):
            values: dict = {0: level, 1: level + 0.004}
            write_cell(root, norm, values, norm_batch_size=size, mixes_samples=True)


LEVELS = {"layer": 0.95, "group": 0.948, "rms": 0.94}


def panel_of(root: Path) -> tuple[tuple[float, float], list[dict[str, Any]], dict[str, Any]]:
    """The main figure's scale and marks, and the label at the end of each line."""
    layers = figures_of(root)["metric_by_size"].spec["vconcat"][0]["layer"]
    (text,) = [one for one in layers if one["mark"]["type"] == "text"]
    labels = {row["norm"]: row for row in text["data"]["values"]}
    return layers[0]["encoding"]["y"]["scale"]["domain"], [one["mark"] for one in layers], labels


@pytest.mark.parametrize(
    ("bad", "outside"),
    [
        ({"none": 0.12}, {"none ↓ 12.2"}),
        ({"none": 0.12, "instance": 0.31}, {"none ↓ 12.2", "instance ↓ 31.2"}),
        ({"none": 0.87}, set()),  # far from the others, but within 10 tolerances
        ({norm: 0.1 for norm in ("none", "dyt", "derf")}, set()),  # as many bad ones as good ones
    ],
)
def test_a_few_bad_norms_do_not_squeeze_the_scale(tmp_path: Path, bad, outside):
    write_levels(tmp_path, LEVELS | bad)
    (low, _), marks, found = panel_of(tmp_path)
    labels = {row["label"] for row in found.values()}
    assert {label for label in labels if "↓" in label} == outside and len(labels) == 3 + len(bad)
    assert (low > 90) == ("arrow" in [mark.get("shape") for mark in marks]) == bool(outside)


def test_a_norm_within_the_interval_of_another_is_not_beyond_the_scale(tmp_path: Path):
    write_levels(tmp_path, LEVELS | {"none": 0.5})
    assert "Arrows at the edge: none" in figures_of(tmp_path)["metric_by_size"].caption
    noisy = {0: 0.99, 1: 0.89}  # two seeds: an interval from 0 to 100 %
    for size in (2, 8):
        write_cell(tmp_path, "power", noisy, norm_batch_size=size, mixes_samples=True)
    assert "Arrows" not in figures_of(tmp_path)["metric_by_size"].caption


@pytest.mark.parametrize(("values", "limits"), [((0.3, 0.9), (0, 100)), ((0.90, 0.901), (88, 93))])
def test_an_axis_of_accuracy_ends_where_accuracies_end(tmp_path: Path, values, limits):
    for size in (2, 8):
        write_cell(tmp_path, "batch", dict(enumerate(values)), norm_batch_size=size)
    (low, high), _, _ = panel_of(tmp_path)
    assert limits[0] <= low < 100 * values[0] and 100 * values[1] < high <= limits[1]
    assert (low, high) == limits or limits != (0, 100)


def test_labels_stand_at_their_lines_and_keep_apart(tmp_path: Path):
    near = {f"norm{i}": 0.9 + 0.0001 * i for i in range(12)}
    write_levels(tmp_path, near | {"layer": 0.83, "group": 0.86})
    (low, high), _, labels = panel_of(tmp_path)
    places = sorted(row["place"] for row in labels.values())
    assert low <= places[0] and places[-1] <= high + 1e-9
    assert np.diff(places).min() > 13 * (high - low) / 320  # a line of text, in the metric
    assert labels["layer"]["place"] == pytest.approx(labels["layer"]["mean"])
    assert sorted(near, key=lambda norm: labels[norm]["place"]) == list(near)


# Other questions


@pytest.mark.parametrize(
    ("suffixes", "kinds"),
    [
        ({2: (2,), 8: (8,)}, ["running", "batch"]),  # each at its own size: one line
        ({2: (16, 2, 8), 8: (16, 2, 8)}, ["running", "batch2", "batch8", "batch16"]),
        ({2: (2,)}, ["running", "batch2"]),
    ],
)
def test_evaluation_statistics_are_those_of_norms_that_mix(tmp_path: Path, suffixes, kinds):
    for size, batches in suffixes.items():
        metrics = {"test/accuracy": 0.9} | {f"test/accuracy@batch{n}": 0.8 for n in batches}
        write_cell(tmp_path, "batch", {0: 0.9}, norm_batch_size=size, metrics=metrics)
    write_cell(tmp_path, "group", {0: 0.9}, metrics={"test/accuracy": 0.9})
    figure = figures_of(tmp_path)["evaluation_statistics"]
    assert {row["norm"] for row in rows_of(figure)} == {"batch"}
    colour = figure.spec["spec"]["layer"][0]["encoding"]["color"]
    assert colour["scale"]["domain"] == kinds
    assert {row["statistics"] for row in rows_of(figure)} == set(kinds)
    caption = figure.caption
    assert "precise" not in caption and ("as in training" in caption) == ("batch" in kinds)
    sizes = [kind.removeprefix("batch") for kind in kinds if kind[-1].isdigit()]
    assert all(f"batch{n}: those of {n} samples" in caption for n in sizes)


def test_learning_rates_mark_the_chosen_one(tmp_path: Path):
    for size in (8, 32):
        for lr, accuracy in ((0.1, 0.8), (0.01, 0.7)):
            write_cell(tmp_path, "batch", {0: accuracy}, batch_size=size, lr=lr)
    figure = figures_of(tmp_path)["learning_rates"]
    rows = {(row["lr"], row["chosen"], row["value"]) for row in rows_of(figure)}
    assert rows == {(0.1, True, "79.5"), (0.01, False, "69.5")}
    assert "69.5" in svg_of(figure)


def test_memory_is_drawn_where_a_gpu_recorded_it(tmp_path: Path):
    write_cell(tmp_path, "group", {0: 0.8})
    assert "memory" not in figures_of(tmp_path)
    write_cell(tmp_path, "batch", {0: 0.8}, result={"timing": TIMING | {"peak_memory_mb": 812.5}})
    figures = figures_of(tmp_path)
    (row,) = rows_of(figures["memory"])
    assert (row["norm"], row["peak_memory_mb"]) == ("batch", 812.5)
    assert "peak GPU memory" in svg_of(figures["memory"])
    assert {row["samples_per_second"] for row in rows_of(figures["throughput"])} == {25600.0}


def test_groups_sweep_has_layer_and_instance_as_levels(tmp_path: Path):
    for groups in (1, 4, 16):
        write_cell(tmp_path, "group", {0: 0.8, 1: 0.81}, knobs={"num_groups": groups})
    for norm in ("layer", "instance"):
        write_cell(tmp_path, norm, {0: 0.8, 1: 0.81})
    figure = figures_of(tmp_path)["groups"]
    assert [row["groups"] for row in rows_of(figure)] == [1, 4, 16, None, None]
    assert "<path" in svg_of(figure)


# Training


def test_curves_and_sites_are_means_over_seeds(figures: dict[str, Figure]):
    assert "Not comparable" not in figures["curves_train_loss"].caption
    curve = rows_of(figures["curves_train_loss"])
    rows = [row for row in curve if row["norm"] == "batch" and row["size"] == 2]
    assert [row["samples"] for row in rows] == [128 * step for step in range(20, 201, 20)]
    assert {row["n"] for row in rows} == {8} and not any(row["lost"] for row in rows)
    sites = [row for row in rows_of(figures["sites_output_rms"]) if row["norm"] == "batch"]
    assert [row["value"] for row in sites] == pytest.approx([1, 1.1, 1.2, 1.3])


def write_losses(seed_dir: Path, losses: Sequence[float], *others: str) -> None:
    rows = [f"{step},0,{step},train/loss,{loss}" for step, loss in enumerate(losses, start=1)]
    text = "\n".join(["step,epoch,samples_seen,name,value", *rows, *others, ""])
    (seed_dir / "metrics.csv").write_text(text)


def test_a_diverging_loss_does_not_squeeze_the_others(tmp_path: Path):
    for norm, losses in (("batch", (2.3, 1.0, 0.5)), ("none", (2.4, 300.0, 1e12))):
        write_losses(write_cell(tmp_path, norm, {0: 0.8}, norm_batch_size=2) / "seed-0", losses)
    (panel,) = figures_of(tmp_path)["curves_train_loss"].spec["vconcat"]
    low, high = panel["layer"][1]["encoding"]["y"]["scale"]["domain"]
    assert low >= 0 and high == pytest.approx(1.5 * 2.4)


def test_long_curves_are_thinned_and_torn_ones_left_out(tmp_path: Path):
    cell = write_cell(tmp_path, "batch", {0: 0.8, 1: None}, leaks_future_in_training=True)
    losses = [1 / step for step in range(1, 1001)]
    write_losses(cell / "seed-0", losses, "1000,1,1000,val/accuracy,0.5")
    (cell / "seed-1" / "metrics.csv").write_text("no header\n")
    figures = figures_of(tmp_path)
    assert "curves_val_accuracy" not in figures  # a single value is no curve
    figure = figures["curves_train_loss"]
    assert 30 < len(rows_of(figure)) <= 60
    assert (rows_of(figure)[-1]["samples"], rows_of(figure)[-1]["lost"]) == (1000, True)
    assert "Not comparable: batch" in figure.caption


# Styles


def test_a_shipped_norm_looks_the_same_in_every_report():
    own = SLOTS[ORDER.index("group")]
    assert assign_styles(["group"])["group"] == own
    assert assign_styles([*ORDER, "mine", "yours"])["group"] == own
    variants = assign_styles(["group num_groups=4", "group num_groups=16", "batch"])
    assert variants["group num_groups=4"] == own and len(set(variants.values())) == 3


def test_of_forty_norms_no_two_share_colour_and_marker():
    labels = [*ORDER, *(f"norm{i}" for i in range(33))]
    styles = assign_styles(labels)
    assert list(styles) == labels
    assert len({(style.colour, style.marker) for style in styles.values()}) == 40
    first = list(styles.values())[:12]
    assert len({style.colour for style in first}) == len({s.marker for s in first}) == 12


def test_numbers_are_ordered_by_value():
    labels = ["group num_groups=16", "mine", "group num_groups=4", "batch"]
    expected = ["batch", "group num_groups=4", "group num_groups=16", "mine"]
    assert order_norms(labels) == expected
