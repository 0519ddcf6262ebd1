"""Figures of a report: their kinds, a dot for every seed, and the page that shows them."""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import vl_convert
from synthetic_study import cell_of, report_of_cells, write_cell, write_study

from normexp.training.records.result import flatten
from normexp.training.studies.report import describe_norm, read_report
from normexp.verdicts import figures, page
from normexp.verdicts.arms import ORDER, order_arms
from normexp.verdicts.figures import (
    COLOURS,
    MARKERS,
    SIZE_COLOURS,
    VERDICTS,
    Figure,
    draw_figures,
    place_arms,
)
from normexp.verdicts.page import norm_table, write_report
from normexp.verdicts.pictures import draw_pictures
from normexp.verdicts.report import Report
from normexp.verdicts.rows import Row

SEEDS = range(4)


def drawn(report: Report) -> dict[str, Figure]:
    (slice_,) = report.slices
    figures = draw_figures(slice_, report.rankings)
    return {figure.name.rpartition("_")[0]: figure for figure in figures}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Report:
    root = tmp_path_factory.mktemp("runs")
    write_study(root, sizes=(2, 128), num_seeds=4)
    report = read_report(root, ["synthetic"])
    write_report(report)
    return report


def test_the_first_figure_is_by_size_and_every_seed_is_a_dot(written: Report):
    (slice_,) = written.slices
    figures = drawn(written)
    assert [*figures][:2] == ["by_size", "ranking"]
    first = figures["by_size"]
    for norm, line in slice_.lines.items():
        for size, grid in line.items():
            rows = [row for row in first.rows if (row["arm"], row["size"]) == (norm, size)]
            dots = [row["value"] for row in rows if row["kind"] == "seed"]
            assert dots == pytest.approx(list(grid.values.values())) and len(dots) == len(SEEDS)
            (mean,) = (row for row in rows if row["kind"] == "mean")
            assert (mean["value"], mean["low"]) == (grid.mean.estimate, grid.mean.low)
    assert (
        vl_convert.vegalite_to_svg(json.dumps(first.spec)).count('aria-roledescription="point')
        >= 24
    )


def test_the_best_and_the_worst_norm_show_what_they_predict():
    pictures = {"batch": b"of batch", "layer": b"of layer", "group": b"of group"}
    rows = []
    for norm, accuracy in {"batch": 0.5, "layer": 0.9, "group": 0.7}.items():
        for row in cell_of(norm, [accuracy, accuracy + 0.01]):
            picture = pictures[norm] if row.seed else b""  # one seed has saved none
            rows.append(replace(row, load_picture=partial(bytes, picture)))
    (slice_,) = report_of_cells(rows).slices
    best, worst = draw_pictures(slice_)
    assert (best.content, worst.content) == (b"of layer", b"of batch")
    assert best.caption.startswith("layer, best mean: 90.5") and "seed 1" in best.caption
    assert b64decode(worst.url.partition(",")[2]) == b"of batch"


def test_sizes_of_a_norm_share_a_panel_and_its_axes(written: Report):
    curves = drawn(written)["curves_train_loss"]
    panels = {row["arm"]: row["panel"] for row in curves.rows}
    assert panels == {norm: norm for norm in ("batch", "layer", "group")}
    assert {row["size"] for row in curves.rows if row["arm"] == "batch"} == {"2", "128"}
    assert {row["size"] for row in curves.rows if row["arm"] == "layer"} == {"any"}
    assert curves.spec["facet"]["sort"] == ["batch", "layer", "group"]
    assert "resolve" not in curves.spec  # one pair of axes
    ends = [row for row in curves.rows if row["kind"] == "seed" and row["arm"] == "layer"]
    assert len(ends) == len(SEEDS)


def test_norms_at_one_size_are_a_list_and_rates_have_their_error():
    grid = {0.1: 0.9, 0.3: 0.8}
    cells = [
        cell_of(norm, [best - 0.01 * seed for seed in SEEDS], lr=lr)
        for norm in ("batch", "group")
        for lr, best in grid.items()
    ]
    figures = drawn(report_of_cells(*cells))
    assert [*figures][:2] == ["by_norm", "rates"]
    dots = [row for row in figures["rates"].rows if row["kind"] == "seed"]
    assert len(dots) == 4 * len(SEEDS) and figures["rates"].title.startswith("test error (%)")
    assert min(row["value"] for row in dots) == pytest.approx(10)


def test_a_page_has_everything_it_shows(written: Report):
    page = (written.directory / "index.html").read_text(encoding="utf-8")
    assert page.index(written.headline(written.slices[0])) < page.index('data-figure="by_size')
    for table in written.tables:
        assert (written.directory / "tables" / f"{table.name}.csv").is_file()
    own = page[: page.index("<script")] + page[page.rindex("<script") :]
    assert "http" not in own  # no request
    for name in ("by_size_main", "ranking_main"):
        assert {path.suffix for path in (written.directory / "figures").glob(f"{name}.*")} == {
            ".svg",
            ".png",
            ".pdf",
            ".csv",
        }


def test_texts_of_runs_are_escaped(tmp_path: Path):
    cells = [cell_of(norm, [0.9, 0.8]) for norm in ("batch", "<img src=x>_%&")]
    report = report_of_cells(*cells)
    object.__setattr__(report, "runs_dir", tmp_path)
    write_report(report)
    assert "<img src=x>" not in (report.directory / "index.html").read_text(encoding="utf-8")
    assert r"\_\%\&" in (report.directory / "tables" / "means_main.tex").read_text(encoding="utf-8")


def test_a_norm_has_one_look_and_no_two_of_forty_share_it():
    places = place_arms(named("own", *ORDER))
    for norm in ORDER:
        assert place_arms(named(norm, "other"))[norm] == places[norm]
    assert places["batch"] == 0
    many = place_arms(named(*(f"norm{place}" for place in range(40)))).values()
    looks = {(COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]) for at in many}
    assert len(looks) == 40
    labels = named("group", "batch") | {"g 16": "g", "g 4": "g"}
    assert order_arms(labels) == ["batch", "group", "g 4", "g 16"]
    variants = {"group num_groups=4": "group", "group num_groups=16": "group"}
    assert place_arms(variants)["group num_groups=4"] == places["group"]


def named(*norms: str) -> dict[str, str]:
    """Labels that are the names of the norms."""
    return dict(zip(norms, norms, strict=True))


def test_every_colour_has_contrast_on_white_and_on_the_dark_page():
    css = (files("normexp.verdicts") / "page.css").read_text(encoding="utf-8")
    pages = [
        luminance(colour) for colour in ("#ffffff", *re.findall("--page: (#[0-9a-f]{6});", css))
    ]
    assert len(pages) == 2
    for colour in {*COLOURS, *SIZE_COLOURS, *VERDICTS.values()}:
        for shade in pages:
            dark, light = sorted([shade, luminance(colour)])
            assert (light + 0.05) / (dark + 0.05) >= 3, colour


def test_a_norm_of_the_user_has_a_colour_far_from_the_shipped_ones():
    own = place_arms(named("Mine", *ORDER))["Mine"]
    for shipped in COLOURS[: len(ORDER)]:
        # On this scale, 2 can be seen side by side, and 50 is another colour at a glance.
        assert math.dist(cielab(COLOURS[own]), cielab(shipped)) > 50, shipped


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` by WCAG, 0 to 1."""
    return float(WEIGHTS[1] @ linear(colour))


# X, Y and Z of sRGB's red, green and blue (IEC 61966-2-1)
WEIGHTS = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return np.array([x / 12.92 if x <= 0.04 else ((x + 0.055) / 1.055) ** 2.4 for x in channels])


def cielab(colour: str) -> tuple[float, float, float]:
    """L*, a* and b*, whose distances are about as large as they look."""
    x, y, z = np.cbrt(WEIGHTS @ linear(colour) / WEIGHTS.sum(axis=1))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_norms_with_one_size_each_are_lines_of_one_panel(tmp_path: Path):
    for norm in ("rms", "group", "own"):
        write_cell(tmp_path, norm, [0.7, 0.9])
    (tmp_path / "synthetic" / "study.jsonl").touch()
    curves = drawn(read_report(tmp_path, ["synthetic"]))["curves_train_loss"]
    assert "facet" not in curves.spec
    assert {row["arm"] for row in curves.rows} == {"rms", "group", "own"}
    means = [row["value"] for row in curves.rows if (row["arm"], row["kind"]) == ("own", "mean")]
    assert means[0] == pytest.approx(2.3 * math.exp(-0.2) + 0.2)  # of both seeds, after 20 steps


def test_ticks_are_the_rates_that_were_tried_and_legends_have_titles():
    tried = (0.02, 0.07, 0.5)
    cells = [
        cell_of(norm, [0.9, 0.8], lr=lr, norm_batch_size=size)
        for norm, sizes in (("batch", (4, 128)), ("rms", (None,)))
        for size in sizes
        for lr in tried
    ]
    figures = drawn(report_of_cells(*cells))
    assert f'"values": {json.dumps(tried)}'.replace("(", "[") in json.dumps(figures["rates"].spec)
    for figure in figures.values():
        svg = vl_convert.vegalite_to_svg(json.dumps(figure.spec))
        titles = re.findall(r"legend titled \W*(\w+)", svg)
        assert titles and set(titles) <= {"norm", "verdict"}, figure.name


def test_a_curve_of_one_evaluation_is_left_out(tmp_path: Path):
    for norm in ("batch", "rms"):
        cell = write_cell(tmp_path, norm, [0.7, 0.9])
        for file in cell.glob("*/metrics.csv"):
            lines = file.read_text().splitlines(keepends=True)
            early = [line for line in lines if line.startswith("100,") and ",val/" in line]
            file.write_text("".join(line for line in lines if line not in early))
    (tmp_path / "synthetic" / "study.jsonl").touch()
    curves = [name for name in drawn(read_report(tmp_path, ["synthetic"])) if "curves" in name]
    assert early and curves == ["curves_train_loss"]


def test_each_norm_has_a_sentence_and_its_cost():
    def timed(norm: str, **timing: float) -> list[Row]:
        (run,) = cell_of(norm, [0.9])
        return [replace(run, measured=flatten({"timing": timing}))]

    slow = {"step_ms": 12.0, "stack_size": 2.0, "peak_memory_mb": 800.0}
    cells = [timed("scale", **slow), timed("rms", step_ms=4.04, stack_size=1.0), timed("mine")]
    cells += [cell_of("rms", {1: 0.9})]  # of TIMING
    rows = norm_table(report_of_cells(*cells).slices[0], describe_norm).frame.set_index("norm")
    assert rows["ms per step"].to_dict() == {"rms": "0.6 to 4.0", "mine": "", "scale": "6.0"}
    assert rows["runs together"].to_dict() == {"rms": "1, 8", "mine": "", "scale": "2"}
    assert rows["peak memory (MB)"].to_dict() == {"rms": "", "mine": "", "scale": "400.0"}
    words = rows["what it does"].to_dict()
    assert words["scale"].startswith("ScaleNorm: each position") and words["mine"] == ""


def test_without_vl_convert_a_page_has_its_tables_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(figures, "vl_convert", None)
    monkeypatch.setattr(page, "MISSING", "no figures: install it")
    write_study(tmp_path, sizes=(2, 128), num_seeds=4)
    report = read_report(tmp_path, ["synthetic"])
    write_report(report)
    text = (report.directory / "index.html").read_text(encoding="utf-8")
    assert "no figures: install it" in text and "<table" in text and 'data-figure="' not in text
    assert [*(report.directory / "figures").iterdir()] == []
    assert (report.directory / "tables" / "means_main.csv").is_file()
