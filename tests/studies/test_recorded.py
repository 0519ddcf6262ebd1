"""What is left to train of a cell, in which stacks, and how often a failure is tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from normexp.records.layout import LOCK_FILE, seed_dir, stack_dir
from normexp.records.lock import StackLock
from normexp.records.reader import read_result
from normexp.records.result import Result
from normexp.records.writer import write_result
from normexp.studies.outcome import Start
from normexp.studies.recorded import record_death, record_failure, recorded_runs, stacks_of


def write(cell: Path, seed: int, status: str, attempts: int | None = None) -> None:
    seed_dir(cell, seed).mkdir(parents=True)
    error = "why" if status == "failed" else None
    result = Result("c", seed, status, {}, {}, {}, error=error, attempts=attempts)
    write_result(seed_dir(cell, seed), result)


def start(cell: Path, seeds: list[int]) -> Start:
    return Start("c", cell, {"norm": "batch"}, seeds, 10)


@pytest.mark.parametrize(
    ("retry_failed", "max_attempts", "missing"),
    [(True, 3, [1, 3]), (True, 4, [1, 2, 3]), (False, 3, [3]), (True, 1, [3])],
)
def test_failed_runs_are_tried_again_up_to_the_limit(
    tmp_path: Path, retry_failed: bool, max_attempts: int, missing: list[int]
):
    write(tmp_path, 0, "finished")
    write(tmp_path, 1, "failed")  # of before attempts were counted: one
    write(tmp_path, 2, "failed", attempts=3)
    recorded = recorded_runs(tmp_path, [0, 1, 2, 3])
    assert [run.seed for run in recorded.ended] == [0]
    assert missing == recorded.missing(retry_failed=retry_failed, max_attempts=max_attempts)


def test_interrupted_stacks_keep_their_seeds_together(tmp_path: Path):
    for first, last in [(2, 3), (5, 6), (8, 9)]:
        stack_dir(tmp_path, first, last).mkdir(parents=True)
    (stack_dir(tmp_path, 2, 3) / "last.ckpt").touch()
    (stack_dir(tmp_path, 5, 6) / "last.ckpt").touch()  # seed 6 is not asked for
    assert stacks_of(tmp_path, [0, 1, 2, 3, 4, 5, 8, 9]) == [[0, 1], [2, 3], [4, 5], [8, 9]]


def test_attempts_add_up(tmp_path: Path):
    write(tmp_path, 0, "failed", attempts=2)
    record_failure(start(tmp_path, [0, 1]), [0, 1], "again")
    assert [read_result(seed_dir(tmp_path, seed)).attempts for seed in (0, 1)] == [3, 1]


def test_death_is_recorded_for_unended_runs_alone(tmp_path: Path):
    write(tmp_path, 0, "finished")
    results = record_death(start(tmp_path, [0, 1]), [0, 1], "killed")
    assert [run.status for run in results] == ["finished", "failed"]
    assert read_result(seed_dir(tmp_path, 1)).error == "killed"


def test_death_is_not_recorded_where_somebody_else_trains_by_now(tmp_path: Path):
    with StackLock(tmp_path / LOCK_FILE) as held:
        assert held
        assert record_death(start(tmp_path, [0]), [0], "killed") == []
    assert not seed_dir(tmp_path, 0).exists()
