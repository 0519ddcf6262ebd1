"""Figures of a report: their kinds, a dot for every seed, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vl_convert
from synthetic_study import cell_of, report_of_cells, write_study

from normexp.reporting import page
from normexp.reporting.cells import ORDER, order_norms
from normexp.reporting.figures import COLOURS, Figure, assign_styles, draw_figures
from normexp.reporting.page import write_report
from normexp.reporting.report import Report, read_report

SEEDS = range(4)


def drawn(report: Report) -> dict[str, Figure]:
    (part,) = report.slices
    figures = draw_figures(part, next(iter(report.rankings), None))
    return {figure.name.rpartition("_")[0]: figure for figure in figures}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Report:
    root = tmp_path_factory.mktemp("runs")
    write_study(root, sizes=(2, 128), num_seeds=4)
    report = read_report(root, ["synthetic"])
    write_report(report)
    return report


def test_the_first_figure_is_by_size_and_every_seed_is_a_dot(written: Report):
    (part,) = written.slices
    figures = drawn(written)
    assert [*figures][:2] == ["by_size", "ranking"] and "cost" in figures
    first = figures["by_size"]
    for norm, line in part.lines.items():
        for size, grid in line.items():
            rows = [row for row in first.rows if (row["norm"], row["size"]) == (norm, size)]
            dots = [row["value"] for row in rows if row["kind"] == "seed"]
            assert dots == pytest.approx(list(grid.values.values())) and len(dots) == len(SEEDS)
            (mean,) = (row for row in rows if row["kind"] == "mean")
            assert (mean["value"], mean["low"]) == (grid.mean.estimate, grid.mean.low)
    assert (
        vl_convert.vegalite_to_svg(json.dumps(first.spec)).count('aria-roledescription="point')
        >= 24
    )


def test_sizes_of_a_norm_share_a_panel_and_its_axes(written: Report):
    curves = drawn(written)["curves_train_loss"]
    panels = {row["norm"]: row["panel"] for row in curves.rows}
    assert panels == {norm: norm for norm in ("batch", "layer", "group")}
    assert {row["size"] for row in curves.rows if row["norm"] == "batch"} == {"2", "128"}
    assert "resolve" not in curves.spec  # one pair of axes
    ends = [row for row in curves.rows if row["kind"] == "seed" and row["norm"] == "layer"]
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
    styles = assign_styles(["own", *ORDER])
    for norm in ORDER:
        assert assign_styles([norm, "other"])[norm] == styles[norm]
    assert styles["batch"][0] == COLOURS[0]
    many = assign_styles(f"norm{place}" for place in range(40))
    assert len({style[:2] for style in many.values()}) == 40
    assert order_norms(["g 16", "g 4", "group", "batch"]) == ["batch", "group", "g 4", "g 16"]


def test_without_vl_convert_a_page_has_its_tables_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page, "vl_convert", None)
    monkeypatch.setattr(page, "MISSING", "no figures: install it")
    write_study(tmp_path, sizes=(2, 128), num_seeds=4)
    report = read_report(tmp_path, ["synthetic"])
    write_report(report)
    text = (report.directory / "index.html").read_text(encoding="utf-8")
    assert "no figures: install it" in text and "<table" in text and 'data-figure="' not in text
    assert [*(report.directory / "figures").iterdir()] == []
    assert (report.directory / "tables" / "means_main.csv").is_file()
