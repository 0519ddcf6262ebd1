"""The numbers of the tables: intervals within the range of a metric, and sensitivity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_study import slices_of, write_cell

from normexp.reporting.cells import build_cells
from normexp.reporting.frame import read_studies
from normexp.reporting.sentences import answer_slices
from normexp.reporting.tables import (
    Table,
    cell_table,
    comparison_table,
    sensitivity_table,
    size_table,
)


@pytest.mark.parametrize(
    "values", [(0.75, 0.954), (0.999, 1.0, 1.0), (1.0,) * 8, (0.0, 0.003), (0.98, 0.98)]
)
def test_no_interval_of_a_table_leaves_the_range_or_has_no_width(tmp_path: Path, values):
    write_cell(tmp_path, "batch", dict(enumerate(values)), norm_batch_size=2)
    write_cell(tmp_path, "group", {0: 0.98, 1: 0.977, 2: 0.98})  # tells the step of a count
    records = read_studies(tmp_path, ["synthetic"])
    row = cell_table(build_cells(records), records.runs, None, None).rows[0]
    n = len(values)
    for name in ("mean", "IQM", *["median"] * (n > 4)):
        low, high = row[f"{name} low"], row[f"{name} high"]
        assert 0 <= low <= row[name] <= high <= 100 and high - low > 0.01


def test_sensitivity_names_the_sizes_that_it_is_about(tmp_path: Path):
    rng = np.random.default_rng(0)
    for size, level in ((2, 0.86), (8, 0.88), (32, 0.91), (128, 0.90)):
        values = dict(enumerate(rng.normal(level, 0.001, 8)))
        write_cell(tmp_path, "batch", values, norm_batch_size=size)
    (row,) = sensitivity_table(answer_slices(slices_of(tmp_path))).rows
    assert (row["from"], row["to"], row["best size"]) == (128, 2, 32)
    drop, regret = (float(row[key].split()[0]) for key in ("drop", "regret at the smallest size"))
    assert (drop, regret) == (pytest.approx(4.0, abs=0.2), pytest.approx(5.0, abs=0.2))
    # 1 point is lost between 32 (a gain) and 8 (2 points); then two halvings to 8
    size = float(row["passed at size"].split()[0])
    assert 8 < size < 32 and row["threshold"] == "1 point"
    assert row["loss per halving"].endswith("(128 to 2)")


def test_size_of_one_seed_is_named_without_an_interval(tmp_path: Path):
    for size, value in ((2, 0.60), (8, 0.80), (32, 0.90)):
        write_cell(tmp_path, "batch", {0: value}, norm_batch_size=size)
    (row,) = sensitivity_table(answer_slices(slices_of(tmp_path))).rows
    assert 8 < float(row["passed at size"]) < 32


def test_comparisons_show_the_p_of_the_whole_family(tmp_path: Path):
    values = {0: 0.90, 1: 0.9012, 2: 0.8991}
    write_cell(tmp_path, "batch", values, norm_batch_size=2)
    for norm, ahead in (("group", 0.01), ("layer", 0.02)):
        own = {seed: value + ahead * (1 + 0.1 * seed) for seed, value in values.items()}
        write_cell(tmp_path, norm, own)
    (answer,) = answer_slices(slices_of(tmp_path))
    rows = comparison_table([answer]).rows
    assert [row["p in the family"] for row in rows] == [one.p for one in answer.comparisons]
    assert [row["verdict"] for row in rows] == ["better", "better"]
    assert {row["at"] for row in rows} == {"norm batch size 2"}


def paper_table(root: Path) -> Table:
    (part,) = slices_of(root)
    return size_table(part)


def test_the_paper_table_has_the_best_in_bold_with_what_ties_by_the_test(tmp_path: Path):
    rng = np.random.default_rng(1)
    levels = {"batch": (0.90, 0.95), "layer": (0.951, 0.951), "group": (0.95, 0.95)}
    for norm, own in levels.items():
        for size, level in zip((2, 128), own, strict=True):
            values = dict(enumerate(rng.normal(level, 0.002, 8)))
            options = {"norm_batch_size": size, "mixes_samples": True}
            write_cell(tmp_path, norm, values, **options)
    write_cell(tmp_path, "none", {0: 0.99, 1: None}, norm_batch_size=2, mixes_samples=True)
    table = paper_table(tmp_path)
    assert table.columns == ["norm", "2", "128"]
    assert [row["norm"] for row in table.rows] == ["batch", "layer", "group", "none"]
    bold = {column: {row for row, name in table.bold if name == column} for column in ("2", "128")}
    assert bold == {"2": {1, 2}, "128": {0, 1, 2}}  # a norm that diverged is not the best
    assert "(1/8 ×1 ?6)" in table.rows[3]["2"] and table.rows[3]["128"] != table.rows[3]["2"]
    markdown, latex = table.to_markdown(), table.to_latex()
    shown = table.rows[1]["2"]
    assert f"| layer | **{shown}** |" in markdown and "| none | 99.0" in markdown
    assert rf"layer & \textbf{{{shown}}} &" in latex
    assert r"\multicolumn{2}{c}{norm batch size} \\" in latex and r"\cmidrule(lr){2-3}" in latex
    assert latex.count(r"\textbf") == markdown.count("**") / 2 == 5
    for rule in ("top", "mid", "bottom"):
        assert rf"\{rule}rule" in latex


def test_one_seed_has_nothing_in_bold(tmp_path: Path):
    for norm, value in (("batch", 0.9), ("group", 0.5)):
        write_cell(tmp_path, norm, {0: value}, norm_batch_size=2)
    assert not paper_table(tmp_path).bold
