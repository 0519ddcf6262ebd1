"""result.json: what is written comes back, and everything else is refused with its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normexp.errors import UserError
from normexp.records.files import write_config
from normexp.records.paths import Study, find_study, seed_dir, seed_of, stack_dir
from normexp.records.result import Result, read_result, read_run, write_result

FAILED: dict[str, Any] = {"status": "failed", "error": "x", "metrics": {}, "timing": {}}


def make_result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "cell_id": "group-convnet-digits-b32-lr0.1-0123456789",
        "seed": 3,
        "status": "finished",
        "config": {"norm": {"num_groups": 8}, "lr": 0.1, "micro_batch_size": None},
        "metrics": {"val/loss": 0.1 + 0.2, "val/accuracy": 1, "val/accuracy@batch32": 0.9},
        "environment": {"python": "3.11"},
        "num_parameters": 1234,
        "timing": {"train_seconds": 1.5, "stack_size": 4},
    }
    return Result(**values | changes)


@pytest.mark.parametrize(
    "result",
    [
        make_result(),
        make_result(status="diverged", diverged_at_step=17, metrics={}),
        make_result(**FAILED, attempts=3, num_parameters=None),
    ],
    ids=lambda result: result.status,
)
def test_result_round_trip_is_exact(tmp_path: Path, result: Result):
    write_result(tmp_path, result)
    assert read_result(tmp_path) == read_result(tmp_path / "result.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_missing_values_are_absent_and_metrics_are_sorted(tmp_path: Path):
    failed = make_result(**FAILED, num_parameters=None)
    keys = ["schema", "cell_id", "seed", "status", "config", "metrics", "environment", "error"]
    assert list(failed.to_dict()) == [*keys, "attempts"]
    assert failed.to_dict()["schema"] == 1
    assert failed.to_dict()["config"]["micro_batch_size"] is None
    assert "attempts" not in make_result().to_dict()
    texts = []
    for names in (["val/loss", "test/loss"], ["test/loss", "val/loss"]):
        write_result(tmp_path, make_result(metrics={name: 1.0 for name in names}))
        texts.append((tmp_path / "result.json").read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        *(
            ({"metrics": {"val/loss": value}}, "val/loss=")
            for value in (float("nan"), float("inf"), None, "0.9", True)
        ),
        ({"timing": {"step_ms": float("nan")}}, "step_ms=nan"),
        ({"status": "done"}, "status='done'"),
        ({"status": "diverged"}, "diverged_at_step"),
        ({"diverged_at_step": 3}, "diverged_at_step"),
        ({"status": "failed"}, "error"),
        ({"error": "x"}, "error"),
    ],
)
def test_result_that_contradicts_itself_is_refused(changes: dict[str, Any], name: str):
    with pytest.raises(ValueError, match=name):
        make_result(**changes)


def test_nan_deep_in_the_config_leaves_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(tmp_path, make_result(config={"norm": {"bound": float("nan")}}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"schema": 2}, "schema=2"),
        ({"schema": None}, "schema=None"),
        ({"cell_id": ...}, "cell_id missing"),
        ({"status": "done"}, "status='done'"),
        ({"metrics": {"val/accuracy": None}}, "val/accuracy=None"),
        ({"seed": "0"}, "seed='0'"),
        ({"timing": 3}, "timing"),
        ({"timings": {}}, "unknown key timings"),
    ],
)
def test_file_that_is_no_result_is_named_with_its_fault(
    tmp_path: Path, changes: dict[str, Any], name: str
):
    content = {k: v for k, v in (make_result().to_dict() | changes).items() if v is not ...}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=name) as caught:
        read_result(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def add_run(study: Path, cell: str, seed: int, **changes: Any) -> Path:
    """An ended run on disk; returns its directory."""
    directory = seed_dir(study / cell, seed)
    directory.mkdir(parents=True)
    write_config(directory.parent, "lr: 0.1\n")
    write_result(directory, make_result(cell_id=cell, seed=seed, **changes))
    return directory


def test_result_of_another_directory_is_refused(tmp_path: Path):
    run_dir = add_run(tmp_path, "cell-b", 3)
    assert read_run(run_dir).seed == 3
    with pytest.raises(UserError, match="cell-b, seed 3"):
        read_run(run_dir.rename(tmp_path / "cell-b" / "seed-4"))


def test_study_is_found_or_its_nearest_names_are_told(tmp_path: Path):
    with pytest.raises(UserError, match="study=sweep not found: .* has no studies yet"):
        find_study(tmp_path / "runs", "sweep")
    add_run(tmp_path / "sensitivity", "cell", 0)
    (tmp_path / "default").mkdir()
    Study(tmp_path / "default").file.touch()
    (tmp_path / "notes").mkdir()
    assert find_study(tmp_path, "default") == tmp_path / "default"
    assert find_study(tmp_path, "sensitivity") == tmp_path / "sensitivity"
    with pytest.raises(UserError, match="study=sensitivty .*nearest: sensitivity$"):
        find_study(tmp_path, "sensitivty")
    for name in ("..", "sensitivity/cell", "", "notes"):
        with pytest.raises(UserError, match="not found"):
            find_study(tmp_path, name)


def test_layout_is_the_documented_one(tmp_path: Path):
    study = Study(tmp_path / "runs" / "default")
    cell = study.root / "cell"
    assert seed_dir(cell, 3) == cell / "seed-3"
    assert stack_dir(cell, 0, 3) == cell / "stacks" / "0-3"
    assert (study.name, study.file) == ("default", study.root / "study.jsonl")
    assert [seed_of(Path(name)) for name in ("seed-0", "seed-12", "seed-012", "seed-x", "0")] == [
        *(0, 12, None, None, None)
    ]
    assert study.list_cells() == study.list_runs() == []
