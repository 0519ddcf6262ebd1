"""Reading a study: unended, torn, foreign and evaluated runs; cells, labels and counts."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from synthetic_study import write_cell

from normexp.errors import UserError
from normexp.records.files import write_json
from normexp.reporting.cells import build_cells
from normexp.reporting.frame import read_studies, values_of
from normexp.reporting.metric import describe_metric
from normexp.reporting.tables import cell_table, run_table, show

ACCURACY = describe_metric("test/accuracy")


def cells_of(root: Path, *names: str) -> pd.DataFrame:
    return build_cells(read_studies(root, names or ["synthetic"]))


def labels_of(root: Path, *names: str) -> list[str]:
    return cells_of(root, *names)["norm"].tolist()


# Reading


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """A cell with two finished seeds."""
    return write_cell(tmp_path, "batch", {0: 0.8, 1: 0.9}, knobs={"eps": 1e-5, "dims": [1, 2]})


def test_a_run_is_a_row_with_config_metrics_and_timing(tmp_path: Path, cell: Path):
    row = read_studies(tmp_path, ["synthetic"]).runs.iloc[1]
    assert (row["study"], row["cell"], row["seed"], row["status"]) == (
        *("synthetic", str(cell), 1, "finished"),
    )
    assert (row["norm"], row["norm.eps"], row["norm.dims"]) == ("batch", 1e-5, (1, 2))
    assert (row["batch_size"], row["micro_batch_size"]) == (128, None)
    assert (row["test/accuracy"], row["timing.step_ms"], row["environment.python"]) == (
        *(0.9, 5.0, "3.11"),
    )


def test_evaluations_become_metrics_with_a_suffix(tmp_path: Path, cell: Path):
    content = {
        "running": {"test/accuracy": 0.1},  # what the training recorded stands
        "precise": {"test/accuracy": 0.85, "num_samples": 4096},
        "gap": {"norm1": {"mean_shift": {"mean": 0.1}}},
    }
    write_json(cell / "seed-0" / "evaluation.json", content)
    runs = read_studies(tmp_path, ["synthetic"]).runs
    assert runs.loc[0, ["test/accuracy", "test/accuracy@precise"]].tolist() == [0.8, 0.85]
    assert not [name for name in runs if "num_samples" in name or "gap" in name]


def test_runs_without_a_result_are_counted_and_cells_without_any_named(tmp_path: Path, cell: Path):
    (cell / "seed-2").mkdir()
    (tmp_path / "synthetic" / "later" / "seed-0").mkdir(parents=True)
    records = read_studies(tmp_path, ["synthetic"])
    assert (len(records.runs), records.num_unended, records.problems) == (2, 2, [])
    (line,) = records.waiting
    assert line.startswith("later: 1 run")


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
def test_a_broken_result_is_one_line_and_the_rest_is_read(tmp_path: Path, cell: Path, how: str):
    corrupt(cell / "seed-1" / "result.json", how)
    records = read_studies(tmp_path, ["synthetic"])
    assert records.runs["seed"].tolist() == [0]
    (problem,) = records.problems
    assert "seed-1" in problem and "\n" not in problem
    assert cells_of(tmp_path)["missing"].tolist() == [1]


def test_studies_without_a_readable_result_are_refused(tmp_path: Path, cell: Path):
    corrupt(cell / "seed-0" / "result.json", "torn")
    corrupt(cell / "seed-1" / "result.json", "torn")
    (tmp_path / "young" / "cell" / "seed-0").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "study.jsonl").write_text("")
    for name, words in {
        "synthetic": "first problem: .*seed-0",
        "young": "no ended run yet, 1",
        "empty": "has no runs",
        "syntetic": "nearest: synthetic",
    }.items():
        with pytest.raises(UserError, match=f"study={name} .*{words}"):
            read_studies(tmp_path, [name])


# Cells


def test_values_are_of_finished_seeds_alone_and_others_are_counted(tmp_path: Path):
    path = write_cell(tmp_path, "batch", {0: 0.9, 2: 0.8, 3: 0.7}, failed=[3])
    last_seen = {"metrics": {"test/accuracy": 0.1}}  # of a run that diverged, so no result of it
    write_cell(tmp_path, "batch", {1: None}, result=last_seen)
    write_cell(tmp_path, "group", dict.fromkeys(range(6), 0.9))
    values = values_of(read_studies(tmp_path, ["synthetic"]).runs, ACCURACY)[str(path)]
    assert values.dropna().to_dict() == {0: 90.0, 2: 80.0}
    batch = cells_of(tmp_path).iloc[0]
    counts = batch[["expected", "finished", "diverged", "failed", "missing"]].tolist()
    assert counts == [6, 2, 1, 1, 2]
    assert batch["error"] == "CUDA out of memory"


def test_sizes_are_effective(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.9}, micro_batch_size=16)
    (cell,) = cells_of(tmp_path).itertuples()
    assert (cell.micro_batch_size, cell.norm_batch_size, cell.protocol) == (16, 16, "accumulated")


def test_norms_of_one_name_are_labelled_by_the_knobs_in_which_they_differ(tmp_path: Path):
    for groups in (16, 4):
        write_cell(tmp_path, "group", {0: 0.9}, knobs={"num_groups": groups, "affine": True})
    write_cell(tmp_path, "layer", {0: 0.9})
    assert labels_of(tmp_path) == ["layer", "group num_groups=4", "group num_groups=16"]


def test_a_momentum_that_follows_from_the_size_is_no_knob(tmp_path: Path):
    for size in (2, 8):
        knobs = {"momentum": size / 80}
        write_cell(tmp_path, "batch", {0: 0.9}, norm_batch_size=size, knobs=knobs)
    assert set(labels_of(tmp_path)) == {"batch"}


def test_parts_of_the_user_are_called_by_their_class_or_name(tmp_path: Path):
    identity = {
        "model": {"_target_": "my_pkg.MyNet", "width": 8},
        "data": {"_target_": "my_pkg.load_cats"},
        "optim": {"_target_": "my_pkg.Lion"},
        "norm": {"_target_": "my_pkg.MyNorm"},
    }
    for kind in ("custom", "mine"):  # `mine`: a YAML file of the user's
        parts = dict.fromkeys(("model", "data", "optim"), kind)
        write_cell(tmp_path, kind, {0: 0.9}, identity=identity, **parts)
    named = {**identity, "model": {"name": "resnet50"}}
    write_cell(tmp_path, "batch", {0: 0.9}, model="torchvision", identity=named)
    cells = cells_of(tmp_path).set_index("norm")
    assert cells.loc["MyNorm", "title"] == "MyNet on load_cats, optim=Lion"
    assert cells.loc["mine", "title"] == "mine on mine, optim=mine"
    assert cells.loc["batch", "title"] == "resnet50 on cifar10, optim=sgd"


def test_a_norm_that_leaks_is_stamped(tmp_path: Path):
    write_cell(tmp_path, "instance", {0: 0.9}, result={"invalid": "leaks the future"})
    assert labels_of(tmp_path) == ["instance INVALID"]


@pytest.mark.parametrize(
    ("changes", "identity", "words"),
    [
        ({"precision": "bf16-mixed"}, {}, "precision=bf16-mixed"),
        ({"max_grad_norm": 1.0}, {}, "max_grad_norm=1.0"),
        ({"num_steps": 7}, {}, "num_steps=7"),
        ({}, {"model": {"width": 8}}, "model.width=8"),
        ({}, {"model": {"source_digest": "b7"}}, "model.source_digest=b7"),
        ({}, {"data": {"digest": "b7"}}, "data.digest=b7"),
        ({}, {"optim": {"momentum": 0.5}}, "optim.momentum=0.5"),
        ({}, {"norm": {"source_digest": "b7"}}, "layer source_digest=b7"),
        ({}, {"norm": {"affine": False}}, "layer affine=false"),
    ],
)
def test_cells_that_differ_in_anything_show_it_in_titles_and_tables(
    tmp_path: Path, changes, identity, words: str
):
    before = {"precision": "32-true", "max_grad_norm": None, "num_steps": 9}
    parts = {"model": {}, "data": {}, "optim": {}, "norm": {}}
    write_cell(tmp_path, "layer", {0: 0.9}, identity=parts, **before)
    write_cell(tmp_path, "layer", {0: 0.9}, identity=parts | identity, **before | changes)
    records = read_studies(tmp_path, ["synthetic"])
    cells = build_cells(records)
    assert (cells["norm"] + ", " + cells["title"]).str.contains(words, regex=False).sum() == 1
    for table in (cell_table(cells, records.runs, None, None), run_table(cells, records.runs)):
        texts = table.frame[table.columns].drop(columns="directory").map(show)
        assert not texts.duplicated().any()


def test_a_budget_separates_cells_unless_it_follows_from_the_size(tmp_path: Path):
    for size in (32, 128):
        options = {"batch_size": size, "num_steps": 12800 // size}
        write_cell(tmp_path, "batch", {0: 0.9}, study="by_size", **options)
    for steps in (100, 200):
        write_cell(tmp_path, "batch", {0: 0.9}, study="at_one_size", num_steps=steps)
    assert cells_of(tmp_path, "by_size")["settings"].nunique() == 1
    cells = cells_of(tmp_path, "at_one_size")
    titles = ["resnet on cifar10, num_steps=100", "resnet on cifar10, num_steps=200"]
    assert cells["title"].tolist() == titles


def test_ghost_and_accumulated_cells_of_one_size_are_told_apart(tmp_path: Path):
    write_cell(tmp_path, "batch", {0: 0.9}, norm_batch_size=8)
    write_cell(tmp_path, "batch", {0: 0.9}, micro_batch_size=8)
    assert set(labels_of(tmp_path)) == {"batch ghost", "batch accumulated"}


def test_two_studies_share_settings_where_only_the_study_tells_them_apart(tmp_path: Path):
    for name, epochs in (("a", 3), ("b", 4)):
        write_cell(tmp_path, "batch", {0: 0.9}, study=name, epochs=epochs)
    cells = cells_of(tmp_path, "a", "b")
    assert cells["norm"].tolist() == ["batch · a", "batch · b"]
    assert cells["base"].tolist() == ["batch", "batch"] and cells["settings"].nunique() == 1


def test_a_run_that_a_callback_has_ended_is_named_in_the_tables(tmp_path: Path):
    early = {"steps": 40, "stopped": "EarlyStopping: val/loss did not improve"}
    write_cell(tmp_path, "group", {0: 0.8, 1: 0.9}, result=early)
    records = read_studies(tmp_path, ["synthetic"])
    cells = build_cells(records)
    assert cell_table(cells, records.runs, None, None).rows[0]["note"] == "2 of 2 ended early"
    runs = run_table(cells, records.runs).rows
    assert {(run["steps"], run["stopped"]) for run in runs} == {(40, early["stopped"])}
