"""The time a dry run expects, from the runs of a study that are most alike."""

from __future__ import annotations

import pytest

from normexp.config.spec import Outcome
from normexp.records.result import Result
from normexp.sweeps.status import expected_seconds

SIZES = {"batch_size": 8, "micro_batch_size": None, "norm_batch_size": None}


def timed(norm: str, step_ms: float, **config: object) -> Result:
    content = {"model": "m", "data": "d", "norm": norm, **SIZES, **config}
    timing = {"step_ms": step_ms, "stack_size": 4}
    return Result("c", 0, "finished", content, {}, {}, timing=timing)


def planned(norm: str) -> Outcome:
    record = {"model": "m", "data": "d", "norm": norm, **SIZES, "num_steps": 1000}
    return Outcome("planned", norm, "c", record=record, missing=[0, 1])


def test_the_likest_runs_count():
    runs = [timed("batch", 8.0), timed("batch", 80.0, norm_batch_size=2), timed("group", 800.0)]
    # 8 ms for 4 replicas: 2 ms for one, of 1000 steps and 2 replicas
    assert expected_seconds(planned("batch"), runs) == pytest.approx(4.0)
    # another norm: the median of the same model, data and batch size, 80 ms for 4
    assert expected_seconds(planned("layer"), runs) == pytest.approx(40.0)


def test_nothing_alike_is_unknown():
    assert expected_seconds(planned("batch"), []) is None
    assert expected_seconds(planned("batch"), [timed("batch", 8.0, model="other")]) is None
