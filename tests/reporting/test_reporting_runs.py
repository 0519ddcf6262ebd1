"""Reading a study for a report: unended, torn, foreign and evaluated runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_study import make_runs, write_runs

from normexp.errors import UserError
from normexp.records.files import write_evaluation
from normexp.reporting.cells import build_cells
from normexp.reporting.runs import load_runs


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """A cell with two finished seeds."""
    return write_runs(make_runs("batch", {0: 0.8, 1: 0.9}, root=tmp_path))


def test_evaluations_become_metrics_with_a_suffix(tmp_path: Path, cell: Path):
    content = {
        "running": {"test/accuracy": 0.1},  # what the training recorded stands
        "precise": {"test/accuracy": 0.85, "num_samples": 4096},
        "gap": {"norm1": {"mean_shift": {"mean": 0.1}}},
    }
    write_evaluation(cell / "seed-0", content)
    metrics = load_runs(tmp_path, "synthetic").runs[0].result.metrics
    assert (metrics["test/accuracy"], metrics["test/accuracy@precise"]) == (0.8, 0.85)
    assert not [name for name in metrics if "num_samples" in name or "gap" in name]


def test_a_run_without_a_result_is_unended(tmp_path: Path, cell: Path):
    (cell / "seed-2").mkdir()
    study = load_runs(tmp_path, "synthetic")
    assert (len(study.runs), study.unended, study.problems) == (2, [cell / "seed-2"], [])


def corrupt(file: Path, how: str) -> None:
    content = json.loads(file.read_text())
    if how == "torn":
        file.write_text(file.read_text()[:50])
        return
    if how == "another schema":
        content["schema"] = 2
    elif how == "foreign":
        content = {"loss": 1}
    elif how == "moved":
        content["seed"] = 7
    elif how == "without sizes":
        del content["config"]["batch_size"]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("how", ["torn", "another schema", "foreign", "moved", "without sizes"])
def test_a_broken_result_is_one_marked_line_and_the_rest_is_read(
    tmp_path: Path, cell: Path, how: str
):
    corrupt(cell / "seed-1" / "result.json", how)
    study = load_runs(tmp_path, "synthetic")
    assert [run.result.seed for run in study.runs] == [0]
    (problem,) = study.problems
    assert "seed-1" in problem and "\n" not in problem
    (only,) = build_cells([study])
    assert only.missing == [1]


def test_no_readable_result_at_all_is_refused_with_the_first_problem(tmp_path: Path, cell: Path):
    for seed in (0, 1):
        corrupt(cell / f"seed-{seed}" / "result.json", "torn")
    with pytest.raises(UserError, match="no readable result; the first problem: .*seed-0"):
        load_runs(tmp_path, "synthetic")


def test_a_study_that_has_only_begun_is_refused_with_the_count(tmp_path: Path):
    (tmp_path / "young" / "cell" / "seed-0").mkdir(parents=True)
    with pytest.raises(UserError, match="study=young has no ended run yet, 1 in"):
        load_runs(tmp_path, "young")


def test_an_empty_study_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "study.jsonl").write_text("")
    with pytest.raises(UserError, match="study=empty is empty"):
        load_runs(tmp_path, "empty")


def test_an_unknown_study_names_the_nearest(tmp_path: Path, cell: Path):
    assert cell.exists()
    with pytest.raises(UserError, match="nearest: synthetic"):
        load_runs(tmp_path, "syntetic")
