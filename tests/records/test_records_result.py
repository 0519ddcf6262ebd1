from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normexp.records.result import Result, read_result, write_result


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
        make_result(
            status="failed", error="out of memory", metrics={}, timing={}, num_parameters=None
        ),
    ],
    ids=lambda result: result.status,
)
def test_result_round_trip_is_exact(tmp_path: Path, result: Result):
    write_result(tmp_path, result)
    assert read_result(tmp_path) == result
    assert read_result(tmp_path / "result.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_result_file_has_schema_1_and_what_is_missing_is_absent(tmp_path: Path):
    failed = make_result(status="failed", error="x", metrics={}, timing={}, num_parameters=None)
    write_result(tmp_path, failed)
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["schema"] == 1
    assert set(content) == {
        *("schema", "cell_id", "seed", "status", "config", "metrics", "environment", "error")
    }
    assert content["config"]["micro_batch_size"] is None


def test_result_file_does_not_depend_on_the_order_of_metrics(tmp_path: Path):
    texts = []
    for names in (["val/loss", "test/loss"], ["test/loss", "val/loss"]):
        write_result(tmp_path, make_result(metrics={name: 1.0 for name in names}))
        texts.append((tmp_path / "result.json").read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None, "0.9", True])
def test_metric_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="val/loss=.* is not a finite number"):
        make_result(metrics={"val/loss": value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "done"}, "status='done' is not one of finished, diverged, failed"),
        ({"status": "diverged"}, "diverged_at_step goes with status diverged"),
        ({"diverged_at_step": 3}, "diverged_at_step goes with status diverged"),
        ({"status": "failed"}, "error goes with status failed"),
        ({"error": "x"}, "error goes with status failed"),
        ({"attempts": 2}, "attempts, from 1, goes with status failed"),
        ({"status": "failed", "error": "x", "attempts": 0}, "attempts, from 1"),
        ({"timing": {"step_ms": float("nan")}}, "step_ms=nan is not a finite number"),
    ],
)
def test_result_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_result(**changes)


def test_nan_deep_in_the_config_leaves_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(tmp_path, make_result(config={"norm": {"bound": float("nan")}}))
    assert list(tmp_path.iterdir()) == []
