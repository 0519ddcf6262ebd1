"""The numbers of the tables: intervals within the range of a metric, and sensitivity."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from synthetic_study import answers_of, cells_of, report_of, write_cell

from normexp.reporting.tables import (
    best_of,
    cell_table,
    paper_tables,
    sensitivity_table,
)


@pytest.mark.parametrize(
    "values", [(0.75, 0.954), (0.999, 1.0, 1.0), (1.0,) * 8, (0.0, 0.003), (0.98, 0.98)]
)
def test_no_interval_of_a_table_leaves_the_range_or_has_no_width(tmp_path: Path, values):
    write_cell(tmp_path, "batch", dict(enumerate(values)), norm_batch_size=2)
    write_cell(tmp_path, "group", {0: 0.98, 1: 0.977, 2: 0.98})  # tells the step of a count
    row = cell_table(cells_of(tmp_path), None, None).rows[0]
    low, high = row["mean low"], row["mean high"]
    assert 0 <= low <= row["mean"] <= high <= 100 and high - low > 0.01


@pytest.mark.parametrize("num_seeds", [1, 8])
def test_sensitivity_names_the_sizes_that_it_is_about(tmp_path: Path, num_seeds: int):
    rng = np.random.default_rng(0)
    for size, level in ((2, 0.86), (8, 0.88), (32, 0.91), (128, 0.90)):
        values = dict(enumerate(rng.normal(level, 0.001, num_seeds)))
        write_cell(tmp_path, "batch", values, norm_batch_size=size)
    (row,) = sensitivity_table(answers_of(tmp_path)).rows
    assert (row["from"], row["to"], row["best size"]) == (128, 2, 32)
    drop, regret = (
        float(row[key].split()[0]) for key in ("worse by", "regret at the smallest size")
    )
    assert (drop, regret) == (pytest.approx(4.0, abs=0.4), pytest.approx(5.0, abs=0.4))
    # 1 point is lost between 32 (a gain) and 8 (2 points)
    size, *interval = row["passed at size"].split(" [", 1)
    assert size == "8 to 32" and row["threshold"] == "1 point"
    assert bool(interval) == (num_seeds > 1)  # one seed has none
    assert row["worse by, per halving"].endswith("(128 to 2)")


@pytest.mark.parametrize(
    ("lost", "passed", "worse", "slope"),
    [
        ((), "8 to 128 [", "5.2 [", "0.79 ["),
        ((8,), "2 to 128 [", "5.2 [", "0.86 ["),  # 5.15 points over 6 halvings, on one line
        ((2,), "<8", "-", "-"),  # not known below 8
        ((2, 8), "-", "-", "-"),
    ],
)
def test_sensitivity_rests_on_the_sizes_that_have_runs(tmp_path: Path, lost, passed, worse, slope):
    loss = {2: 0.05, 8: 0.005 if 2 in lost else 0.015, 128: 0.0}
    for size, less in loss.items():
        values = {k: 0.9 - less * (1 + 0.02 * k) + 0.0017 * k for k in range(4)}
        failed = values if size in lost else ()
        write_cell(tmp_path, "batch", values, norm_batch_size=size, failed=failed)
    (row,) = sensitivity_table(answers_of(tmp_path)).rows
    keys = ("passed at size", "worse by", "worse by, per halving")
    for key, words in zip(keys, (passed, worse, slope), strict=True):
        assert (row[key] or "-").startswith(words)
    assert row["regret at the smallest size"] in (None, "-")  # the best size is the largest


def test_a_cell_of_diverged_runs_has_the_metric_and_the_count_that_it_lacks(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: None, 1: None}, norm_batch_size=2)
    (row,) = cell_table(cells_of(tmp_path), None, None).rows
    assert (row["metric"], row["mean"], row["diverged"]) == ("test accuracy (%)", None, 2)
    (answer,) = answers_of(tmp_path)
    assert "at one norm batch size only, 2 (n = 0 seeds; 2 of 2 diverged)" in answer.losses[0].text


def test_the_paper_table_has_the_norms_in_bold_among_which_the_best_is(tmp_path: Path):
    rng = np.random.default_rng(1)
    levels = {"batch": (0.90, 0.95), "layer": (0.951, 0.951), "group": (0.95, 0.95)}
    for norm, ends in levels.items():
        for size, level in zip((2, 128), ends, strict=True):
            values = dict(enumerate(rng.normal(level, 0.002, 8)))
            options = {"norm_batch_size": size, "mixes_samples": True}
            write_cell(tmp_path, norm, values, **options)
    lost = {0: 0.90, 1: 0.89, **dict.fromkeys(range(2, 8))}  # a norm that diverged is not the best
    write_cell(tmp_path, "none", lost, norm_batch_size=2, mixes_samples=True)
    report = report_of(tmp_path)
    (paper,) = paper_tables(report.slices, best_of(report.rankings))
    assert paper.columns == ["norm", "norm batch size 2", "norm batch size 128"]
    assert [row["norm"] for row in paper.rows] == ["batch", "layer", "group", "none"]
    # The family tests the smallest size alone.
    assert set(paper.bold) == {(1, "norm batch size 2"), (2, "norm batch size 2")}
    assert "(2/8 ×6)" in paper.rows[3]["norm batch size 2"]
    markdown, latex = paper.to_markdown(), paper.to_latex()
    shown = paper.rows[1]["norm batch size 2"]
    assert f"| layer | **{shown}** |" in markdown and "| none | 89.5" in markdown
    assert rf"layer & \textbf{{{shown}}} &" in latex
    assert r"\multicolumn{2}{c}{norm batch size} \\" in latex and r"\cmidrule(lr){2-3}" in latex
    assert latex.count(r"\textbf") == markdown.count("**") / 2 == 2
    texts = paper.of_rows("a", "A", ["a_b"], [{"a_b": "<2"}, {"a_b": "x|y & 5 %"}]).to_latex()
    assert r"a\_b" in texts and "$<$2" in texts and r"x\textbar{}y \& 5 \%" in texts
    assert all(rf"\{place}rule" in latex for place in ("top", "mid", "bottom"))


def test_a_paper_table_spans_data_sets_with_one_number_of_decimals(tmp_path: Path):
    rng = np.random.default_rng(2)
    for data, level in (("digits", 0.96), ("cifar10", 0.5)):
        for norm in ("batch", "group"):
            for size in (2, 8, 32, 128, 512):
                values = dict(enumerate(rng.normal(level, 0.2 * (norm == "group") + 0.001, 3) % 1))
                options: dict = {"norm_batch_size": size, "mixes_samples": True, "data": data}
                write_cell(tmp_path, norm, values, batch_size=512, **options)
    report = report_of(tmp_path)
    (table,) = paper_tables(report.slices, best_of(report.rankings))
    ends = [
        f"{data}, norm batch size {size}" for data in ("cifar10", "digits") for size in (2, 512)
    ]
    assert table.columns == ["norm", *ends] and [row["norm"] for row in table.rows] == [
        "batch",
        "group",
    ]
    texts = [row[column] for row in table.rows for column in table.columns[1:]]
    assert all(re.fullmatch(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", text) for text in texts), texts
    data = [row["data"] for row in cell_table(report.cells, None, None).rows]
    assert data == sorted(data)


def test_a_paper_table_of_many_data_sets_has_the_smallest_size_alone(tmp_path: Path):
    for number in range(9):
        for size in (2, 128):
            options: dict = {"norm_batch_size": size, "mixes_samples": True}
            write_cell(tmp_path, "batch", {0: 0.9, 1: 0.91}, data=f"data{number}", **options)
        (table,) = paper_tables(report_of(tmp_path).slices, {})
        assert len(table.columns) - 1 == (2 * (number + 1) if number < 4 else number + 1)
        assert table.is_for_papers == (number < 8)
