"""A report of records that trainings wrote, against numbers computed from their files alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

import normexp
from normexp.report import main
from normexp.reporting import page
from normexp.reporting.model import differences
from normexp.reporting.report import Report

SWEEP = ["-m", "norm=batch,group", "norm_batch_size=2,32", "steps=10,30", "replicas=4"]


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study `real`: two norms, two sizes, two budgets."""
    folder = tmp_path_factory.mktemp("runs")
    normexp.run([*SWEEP, "study=real", f"runs_dir={folder}"])
    return folder


@pytest.fixture(scope="module")
def report(runs_dir: Path) -> Report:
    return normexp.load_report("real", runs_dir)


def recorded(cell_dir: Path) -> np.ndarray:
    """The test accuracy of each seed in percent."""
    results = [json.loads(path.read_text()) for path in sorted(cell_dir.glob("*/result.json"))]
    return np.array([100 * result["metrics"]["test/accuracy"] for result in results])


def test_budgets_share_a_section_and_a_headline(report: Report):
    assert report.counts == "6 cells, 24 runs: 24 finished"
    (section,) = report.sections
    assert section.heading == "convnet on digits, batch size 32"
    budgets = [answer.parts[0].budget for answer in section.answers]
    assert budgets == ["num_steps=10", "num_steps=30"]
    assert section.headline is not None
    assert all(budget in section.headline.claim for budget in budgets)
    for part in report.slices:
        assert part.independent == {"group"} and part.lines["group"].keys() == {2, 32}
        assert part.differences.keys() >= {"norm", "norm_batch_size"}
        assert part.shared["num_steps"] == part.first.config["num_steps"]


def test_comparisons_are_those_of_scipy_and_name_what_differs(report: Report):
    assert len(report.comparisons) == 4
    for one in report.comparisons:
        first, second = recorded(one.first.directory), recorded(one.second.directory)
        assert one.gap.n == 4 and one.gap.estimate == pytest.approx((first - second).mean())
        test = scipy_stats.ttest_rel(first, second)
        low, high = test.confidence_interval(0.95)
        assert one.gap.low <= low + 1e-9  # wider: over test samples too
        assert one.num_samples > 100
        assert (one.verdict is None) != (one.why_no_verdict is None)
        changed = {key for key in differences(one.first, one.second) if key != "norm_batch_size"}
        assert all(key.partition(".")[0] == "norm" for key in changed)
        assert bool(changed) != one.is_along_sizes and one.budget in one.part.heading


def test_the_page_has_the_budgets_side_by_side(report: Report, runs_dir: Path, monkeypatch):
    monkeypatch.setattr(page, "_write_figure", lambda *_: "")
    assert main(["study=real", f"runs_dir={runs_dir}"]) == 0
    text = (report.directory / "index.html").read_text()
    parts = re.findall(r"<h3>test accuracy \(%\) by norm batch size, (\S+)</h3>|(<ul)", text)
    assert parts[:3] == [("num_steps=10", ""), ("num_steps=30", ""), ("", "<ul")]
    written: dict[str, Any] = json.loads((report.directory / "report.json").read_text())
    low = [row["difference"]["low"] for row in written["comparisons"]]
    assert low == [one.gap.low for one in report.comparisons]


def test_equal_recipes_under_two_ids_are_one_cell(report: Report, runs_dir: Path, tmp_path: Path):
    study = shutil.copytree(runs_dir / "real", tmp_path / "real")
    cell = next(study.glob("group-*"))
    other = shutil.copytree(cell, cell.with_name("zz-other"))
    (other / "seed-0").rename(other / "seed-4")
    for path in other.glob("seed-*/result.json"):
        changed = {"cell_id": other.name, "seed": int(path.parent.name[5:])}
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    cells = normexp.load_report("real", tmp_path).cells
    assert len(cells) == len(report.cells)
    (merged,) = [one for one in cells if one.same_as]
    assert (merged.directory, list(merged.same_as)) == (cell, [other.name])
    assert [run.directory.parent for run in merged.runs] == [cell] * 4 + [other]
