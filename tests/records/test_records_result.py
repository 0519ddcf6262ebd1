"""result.json: what is written comes back, everything else is refused with its file; the layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from normexp.errors import UserError
from normexp.training.records.journal import read_entries
from normexp.training.records.layout import (
    find_study,
    list_cells,
    list_runs,
    list_seeds,
    seed_dir,
    seed_of,
)
from normexp.training.records.result import (
    Measured,
    Result,
    read_result,
    read_result_of_study,
    write_result,
)

MEASURED = {
    "metrics": {"val/loss": 0.1 + 0.2, "val/accuracy": 1.0, "val/accuracy@batch32": 0.9},
    "environment": {"python": "3.11"},
    "num_parameters": 1234,
    "timing": {"train_seconds": 1.5, "stack_size": 4},
}


def make_result(measured: Measured | None = None, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "cell_id": "group-convnet-digits-b32-lr0.1-0123456789",
        "seed": 3,
        "status": "finished",
        "defines": {"norm": {"choice": "group", "num_groups": 8}, "lr": 0.1, "act": None},
        "derived": {"lr": 0.2, "batch_size": 32},
        "measured": measured or Measured(**MEASURED),
    }
    return Result(**values | changes)


FAILED = make_result(Measured(), status="failed", error="x")


@pytest.mark.parametrize(
    "result",
    [make_result(), make_result(Measured(diverged_at_step=17), status="diverged"), FAILED],
    ids=lambda result: result.status,
)
def test_result_round_trip_is_exact(tmp_path: Path, result: Result):
    run_dir = seed_dir(tmp_path / result.cell_id, result.seed)
    run_dir.mkdir(parents=True)
    write_result(run_dir, result)
    assert read_result(run_dir) == read_result(run_dir / "result.json") == result
    assert [path.name for path in run_dir.iterdir()] == ["result.json"]


def test_missing_values_are_absent_and_metrics_are_sorted():
    failed = FAILED.to_dict()
    keys = {"schema", "cell_id", "seed", "status", "defines", "derived", "defaults", "measured"}
    keys |= {"error"}
    assert failed.keys() == keys and failed["measured"] == {}
    assert (failed["schema"], failed["defines"]["act"]) == (3, None)
    metrics = make_result().to_dict()["measured"]["metrics"]
    assert list(metrics) == ["val/accuracy", "val/accuracy@batch32", "val/loss"]


def test_a_list_of_results_is_short_to_print():
    metrics = {"train/loss": 0.5, "test/accuracy": 0.98765, "test/accuracy@precise": 0.9}
    run = repr(make_result(Measured(metrics=metrics, data_set={"moments": [0.1] * 100})))
    assert run == f"<{make_result().cell_id} seed 3: finished, test/accuracy=0.9877>"
    assert repr(FAILED).endswith(" seed 3: failed, x>")


def test_settings_are_flat_and_derived_values_stand_for_typed_ones():
    defines = {"samples": 64, "norm": {"choice": "batch", "half_life": 8}, "data": {"sizes": [1]}}
    defines["model"] = {"choice": "torchvision"}
    derived = {"steps": 2, "norm.momentum": 0.5, "model": "resnet18", "devices": 2}
    derived["channels_last"] = True  # rounds otherwise, and is no other setting
    assert make_result(defines=defines, derived=derived).settings == {
        **{"norm": "batch", "norm.momentum": 0.5, "model": "resnet18"},
        **{"model.choice": "torchvision", "data.sizes": (1,), "samples": 64, "steps": 2},
    }


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"schema": 4}, "schema=4, this normexp reads schema=3"),
        ({"schema": ...}, "schema=None"),
        ({"cell_id": ...}, "missing.*'cell_id'"),
        ({"status": "done"}, "'done' is not a valid Status"),
        ({"timings": {}}, "'timings'"),
        ({"measured": {"speed": 1}}, "'speed'"),
    ],
)
def test_file_that_is_no_result_is_named_with_its_fault(tmp_path: Path, changes, name):
    content = {k: v for k, v in (make_result().to_dict() | changes).items() if v is not ...}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=name) as caught:
        read_result(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_study_of_an_earlier_schema_is_refused_in_one_line_that_names_its_reader(tmp_path: Path):
    path = tmp_path / "mine" / "cell" / "seed-0" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(make_result().to_dict() | {"schema": 1}))
    with pytest.raises(UserError, match="mine was trained by normexp 0.1, .*study=") as caught:
        read_result(path)
    assert "\n" not in str(caught.value)
    journal = tmp_path / "mine" / "study.jsonl"
    journal.write_text('{"line": "command", "id": "a", "cells": {"b": {"title": "", "seeds": []}}}')
    with pytest.raises(UserError, match="mine was trained by normexp 0.2, .*study="):
        read_entries(journal.parent)


# --- The results of a cell, in their folders -----------------------------------------------------


def add_run(study: Path, cell: str, seed: int) -> Path:
    """An ended run on disk; returns its directory."""
    directory = seed_dir(study / cell, seed)
    directory.mkdir(parents=True)
    write_result(directory, make_result(cell_id=cell, seed=seed))
    return directory


def test_study_is_found_or_its_nearest_names_are_told(tmp_path: Path):
    with pytest.raises(UserError, match="runs_dir=.*/runs has no studies yet"):
        find_study(tmp_path / "runs", "sweep")
    add_run(tmp_path / "sensitivity", "cell", 0)
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "study.jsonl").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    for name in ("default", "sensitivity"):
        assert find_study(tmp_path, name) == tmp_path / name
    with pytest.raises(UserError, match="study=sensitivty .*did you mean sensitivity"):
        find_study(tmp_path, "sensitivty")
    for name in ("..", "sensitivity/cell", "", "notes", "file"):
        with pytest.raises(UserError, match="not found"):
            find_study(tmp_path, name)


def test_runs_of_a_study_are_found_by_cell_and_seed(tmp_path: Path):
    assert list_cells(tmp_path / "s") == list_runs(tmp_path / "s") == []
    assert list_seeds(tmp_path / "s" / "removed") == []  # by another process, meanwhile
    runs = [add_run(tmp_path / "s", cell, seed) for cell in "ab" for seed in (0, 2, 10)]
    (tmp_path / "s" / "stacks").mkdir()
    assert list_runs(tmp_path / "s") == runs
    assert runs[0] == tmp_path / "s" / "a" / "seed-0"
    names = ["seed-0", "seed-12", "seed-012", "seed-x", "0"]
    assert [seed_of(Path(name)) for name in names] == [0, 12, None, None, None]


@pytest.mark.parametrize(
    ("name", "value"),
    [("test/accuracy", 1.2), ("val/loss", math.nan), ("test/loss", "0.3"), ("train/loss", None)],
)
def test_a_number_that_no_training_measures_was_typed(tmp_path: Path, name: str, value: object):
    path = tmp_path / "result.json"
    content = make_result().to_dict()
    content["measured"]["metrics"] = {"val/accuracy": 1.0, name: value}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"was edited by hand: {name}={value}; remove it"):
        read_result(path)


@pytest.mark.parametrize("place", ["{cell}-old/seed-3", "{cell}/seed-4"])
def test_a_copy_within_a_study_is_no_run(tmp_path: Path, place: str):
    run = make_result()
    own = tmp_path / run.cell_id / "seed-3"
    copied = tmp_path / place.format(cell=run.cell_id)
    for folder in (own, copied):
        folder.mkdir(parents=True)
        write_result(folder, run)
    assert read_result_of_study(own) == run
    with pytest.raises(UserError, match=f"a copy of seed 3 of {run.cell_id}, or was renamed"):
        read_result_of_study(copied)
