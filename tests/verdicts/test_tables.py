"""Tables as files: numbers in columns of their own, and LaTeX as papers have it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic_study import cell_of, report_of_cells

from normexp.verdicts.report import Report
from normexp.verdicts.tables import write_tables

RNG = np.random.default_rng(21)


def draw(mean: float, n: int = 5) -> list[float]:
    return (mean + 0.004 * RNG.normal(size=n)).tolist()


@pytest.fixture(scope="module")
def report() -> Report:
    """Norms below and above 10 %, a norm with an underscore, a diverged run and a tuned norm."""
    chance: dict[str, Any] = {"chance_accuracy": 0.02}
    sizes = [
        cell_of("batch", draw(mean), norm_batch_size=size, **chance)
        for size, mean in ((4, 0.08), (64, 0.93))
    ]
    own = cell_of("my_norm", [None, *draw(0.8, 4)], **chance)
    tuned = [cell_of("rms", draw(0.9), lr=lr, **chance) for lr in (0.05, 0.2, 0.8)]
    steady = cell_of("steady", (0.85 + 1e-4 * RNG.normal(size=5)).tolist(), **chance)  # 2 decimals
    return report_of_cells(*sizes, own, *tuned, steady)


def test_a_csv_has_the_bounds_in_columns_of_their_own(report: Report, tmp_path: Path):
    write_tables(tmp_path, report.tables)
    (slice_,) = report.slices
    means = pd.read_csv(tmp_path / "means_main.csv").set_index("norm")
    for norm, line in slice_.lines.items():
        for size, grid in line.items():  # also where the page says `same`
            known = [grid.mean.estimate, grid.mean.low, grid.mean.high]
            found = means.loc[norm, [f"{size}", f"{size} low", f"{size} high"]]
            assert found.tolist() == pytest.approx(known)
    at_sizes = pd.read_csv(tmp_path / "ranking_main.csv")
    assert [*at_sizes][-3:] == ["verdict", "why", "n"]
    ranking = at_sizes[at_sizes["norm batch size"] == 4].set_index("norm")
    for one in (place.comparison for place in report.rankings[0].places):
        if one and one.is_comparable:
            row = ranking.loc[one.arm, ["difference", "difference low", "difference high", "n"]]
            assert row.tolist() == pytest.approx([one.gap.estimate, one.gap.low, one.gap.high, 5])
    best = ranking["test accuracy (%) may be best"].notna()
    assert [*ranking.index[best]] == report.rankings[0].best


SPECIAL = re.compile(r"(?<!\\)[%#_~^]|(?<!\\)&(?! )")  # in a text, only with a backslash


def cells_of(latex: str) -> list[list[str]]:
    """The rows of a tabular, with as many cells as it has columns; fails where they do not fit."""
    assert latex.count("{") == latex.count("}") and latex.count("$") % 2 == 0
    (styles,) = re.findall(r"\\begin{tabular}{(.*)}\n", latex)
    num_columns = len(styles.replace(r"@{\ }", ""))
    body = re.split(r"\\(?:top|mid|bottom)rule\n", latex)[1:3]
    rows = [line.removesuffix(r" \\").split(" & ") for text in body for line in text.splitlines()]
    for row in rows:
        spans = [int(n) for n in re.findall(r"\\multicolumn{(\d)}", " ".join(row))]
        assert len(row) + sum(spans) - len(spans) == num_columns
        assert not any(SPECIAL.search(cell) for cell in row), row
    return rows


def test_latex_has_aligned_numbers_a_true_minus_and_the_best_in_bold(
    report: Report, tmp_path: Path
):
    write_tables(tmp_path, report.tables)
    files = {path.stem: path.read_text() for path in tmp_path.glob("*.tex")}
    assert {*files} == {"means_main", "sizes_main", "ranking_main"}
    for name, text in files.items():
        head, *rows = cells_of(text)
        assert r"\caption{Test accuracy (\%)" in text and rf"\label{{tab:{name}}}" in text
        assert not {"why", "lost", "search"} & {*head} and "●" not in text
        numbers = [row[1 if name == "means_main" else 2] for row in rows]
        decimals = [len(n.partition(".")[2]) for n in re.findall(r"[\d.]+", " ".join(numbers))]
        assert len({*decimals}) == 1
        caption = text[text.index(r"\caption") : text.index(r"\label")]
        assert not re.search(r"\w=\S|python|normexp", caption)  # no command
    bold = [row[1] for row in cells_of(files["ranking_main"]) if "boldmath" in row[2]]
    best = [norm for ranking in report.rankings for norm in ranking.best]
    assert bold == [norm.replace("_", r"\_") for norm in best]
    assert re.search(r"\$-\d+\.\d\$ & \[\$-\d", files["sizes_main"])  # in math: a true minus
    assert r"my\_norm" in files["means_main"] and "same" not in files["means_main"]


def test_a_notebook_shows_the_answer_the_figure_and_the_tables(report: Report):
    html = report._repr_html_()
    assert report.headline(report.slices[0]) in html and "<svg" in html
    assert html.count("<table") == len(report.tables_of(report.slices[0]))
    marked = report_of_cells(cell_of("<b>", draw(0.9)), cell_of("batch", draw(0.9)))
    assert "<b>" not in marked._repr_html_()
