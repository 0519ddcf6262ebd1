from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normexp.errors import UserError
from normexp.records.files import write_config
from normexp.records.paths import Study, seed_dir, seed_of, stack_dir
from normexp.records.result import (
    Result,
    find_study,
    read_json,
    read_result,
    read_runs,
    write_result,
)


def add_run(study: Path, cell: str, seed: int, **changes: Any) -> Path:
    """An ended run on disk; returns its directory."""
    directory = seed_dir(Study(study).cell_dir(cell), seed)
    directory.mkdir(parents=True)
    write_config(directory.parent, "lr: 0.1\n")
    values: dict[str, Any] = {
        "status": "finished",
        "config": {"norm": {"name": "group", "sizes": [1, 2]}, "lr": 0.1, "logger": {}, "seed": 0},
        "metrics": {"val/accuracy": 0.5},
        "environment": {"python": "3.11"},
        "timing": {"step_ms": 2.0},
    }
    write_result(directory, Result(cell_id=cell, seed=seed, **values | changes))
    return directory


def test_rows_are_flat_and_lack_what_the_run_lacks(tmp_path: Path):
    add_run(tmp_path, "cell-a", 2)
    rows, problems = read_runs(tmp_path)
    assert problems == []
    assert rows == [
        {
            "cell_id": "cell-a",
            "seed": 2,  # of the run: the config's is the first of its stack
            "status": "finished",
            "norm.name": "group",
            "norm.sizes": [1, 2],
            "lr": 0.1,
            "logger": {},
            "val/accuracy": 0.5,
            "environment.python": "3.11",
            "timing.step_ms": 2.0,
        }
    ]


def test_every_run_is_a_row_or_a_problem(tmp_path: Path):
    add_run(tmp_path, "cell-a", 10)
    add_run(tmp_path, "cell-a", 9, status="failed", error="out of memory", metrics={})
    add_run(tmp_path, "cell-b", 0, status="diverged", diverged_at_step=5, metrics={})
    (add_run(tmp_path, "cell-b", 1) / "result.json").unlink()
    (add_run(tmp_path, "cell-b", 2) / "result.json").write_text('{"schema": 1, "cell_')
    (add_run(tmp_path, "cell-b", 3)).rename(tmp_path / "cell-b" / "seed-4")
    (tmp_path / "report" / "figures").mkdir(parents=True)
    rows, problems = read_runs(tmp_path)
    assert [(row["cell_id"], row["seed"], row["status"]) for row in rows] == [
        ("cell-a", 9, "failed"),
        ("cell-a", 10, "finished"),
        ("cell-b", 0, "diverged"),
    ]
    assert rows[0]["error"] == "out of memory"
    assert rows[2]["diverged_at_step"] == 5
    assert ["seed-1/" in problems[0], "seed-2/" in problems[1]] == [True, True]
    assert "run has not ended" in problems[0]
    assert "not valid JSON" in problems[1]
    assert "seed-4 holds the result of cell-b seed 3" in problems[2]
    assert len(problems) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": 1, "cell_id": "a', r"is not valid JSON .*remove .*result\.json and run again"),
        ("", "is not valid JSON"),
        ("[1, 2]", "is not a file of normexp"),
        ('{"accuracy": 0.9}', "is not a result of normexp"),
        ('{"schema": 2}', "has schema 2, this normexp reads 1"),
        (
            '{"schema": 1, "seed": 0}',
            "edited by hand: cell_id, config, environment, metrics, status",
        ),
        ('{"schema": "1"}', "has schema '1'"),
    ],
)
def test_file_that_is_no_result_is_named_with_a_remedy(tmp_path: Path, content: str, message: str):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_result(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"finished"', '"done"', "status='done'"),
        ('"val/accuracy": 0.5', '"val/accuracy": null', "val/accuracy=None is not a finite number"),
        ('"val/accuracy": 0.5', '"val/accuracy": NaN', "val/accuracy=nan is not a finite number"),
        ('"seed": 0', '"seed": "0"', "seed='0' is not an integer"),
        ('"status"', '"state": 1, "status"', "unknown key state"),
        ('"timing": {', '"timing": 3, "timings": {', "unknown key timings"),
    ],
)
def test_result_edited_by_hand_is_refused(tmp_path: Path, old: str, new: str, message: str):
    path = add_run(tmp_path, "cell", 0, config={}) / "result.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=f"edited by hand: {message}"):
        read_result(path)


def test_unreadable_bytes_and_missing_file_are_user_errors(tmp_path: Path):
    (tmp_path / "result.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(tmp_path / "result.json")
    with pytest.raises(UserError, match="run has not ended"):
        read_result(tmp_path / "nowhere")


def test_find_study_offers_the_nearest_names(tmp_path: Path):
    with pytest.raises(UserError, match="study=sweep not found: .* has no studies yet"):
        find_study(tmp_path / "runs", "sweep")
    add_run(tmp_path / "sensitivity", "cell", 0)
    (tmp_path / "default").mkdir()
    Study(tmp_path / "default").file.touch()
    (tmp_path / "notes").mkdir()
    assert find_study(tmp_path, "default") == tmp_path / "default"
    assert find_study(tmp_path, "sensitivity") == tmp_path / "sensitivity"
    with pytest.raises(UserError, match="study=sensitivty not found .*nearest: sensitivity$"):
        find_study(tmp_path, "sensitivty")
    for name in ("..", "sensitivity/cell", "", "notes"):
        with pytest.raises(UserError, match="not found"):
            find_study(tmp_path, name)


def test_layout_is_the_documented_one(tmp_path: Path):
    study = Study(tmp_path / "runs" / "default")
    cell = study.cell_dir("cell")
    assert cell == tmp_path / "runs" / "default" / "cell"
    assert seed_dir(cell, 3) == cell / "seed-3"
    assert stack_dir(cell, 0, 3) == cell / "stacks" / "0-3"
    assert (study.name, study.file) == ("default", study.root / "study.yaml")
    assert [seed_of(Path(name)) for name in ("seed-0", "seed-12", "seed-012", "seed-x", "0")] == [
        *(0, 12, None, None, None)
    ]
    assert study.list_cells() == study.list_runs() == []
