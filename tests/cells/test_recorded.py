"""What is left to train of a cell, in which stacks, and how often a failure is tried again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from normexp.cells.recorded import record_death, record_failure, recorded_runs, stacks_of
from normexp.config.spec import Start
from normexp.errors import UserError
from normexp.records.files import FileLock
from normexp.records.paths import LOCK_FILE, seed_dir, stack_dir
from normexp.records.result import Result, read_result, write_result


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    folder = tmp_path / "c"
    folder.mkdir()
    return folder


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
    cell: Path, retry_failed: bool, max_attempts: int, missing: list[int]
):
    write(cell, 0, "finished")
    write(cell, 1, "failed")  # of before attempts were counted: one
    write(cell, 2, "failed", attempts=3)
    recorded = recorded_runs(cell, [0, 1, 2, 3])
    assert [run.seed for run in recorded.ended] == [0]
    assert missing == recorded.missing(retry_failed=retry_failed, max_attempts=max_attempts)


def test_interrupted_stacks_keep_their_seeds_together(cell: Path):
    for first, last in [(2, 3), (5, 6), (8, 9)]:
        stack_dir(cell, first, last).mkdir(parents=True)
    (stack_dir(cell, 2, 3) / "last.ckpt").touch()
    (stack_dir(cell, 5, 6) / "last.ckpt").touch()  # seed 6 is not asked for
    assert stacks_of(cell, [0, 1, 2, 3, 4, 5, 8, 9]) == [[0, 1], [2, 3], [4, 5], [8, 9]]


def test_attempts_add_up(cell: Path):
    write(cell, 0, "failed", attempts=2)
    record_failure(start(cell, [0, 1]), [0, 1], "again")
    assert [read_result(seed_dir(cell, seed)).attempts for seed in (0, 1)] == [3, 1]


def test_death_is_recorded_for_unended_runs_alone(cell: Path):
    write(cell, 0, "finished")
    results = record_death(start(cell, [0, 1]), [0, 1], "killed")
    assert [run.status for run in results] == ["finished", "failed"]
    assert read_result(seed_dir(cell, 1)).error == "killed"


def test_death_is_not_recorded_where_somebody_else_trains_by_now(cell: Path):
    with FileLock(cell / LOCK_FILE) as held:
        assert held
        assert record_death(start(cell, [0]), [0], "killed") == []
    assert not seed_dir(cell, 0).exists()


def test_result_that_was_copied_is_not_a_seed_of_its_own(cell: Path):
    write(cell, 1, "finished")
    seed_dir(cell, 0).mkdir()
    shutil.copy(seed_dir(cell, 1) / "result.json", seed_dir(cell, 0))
    with pytest.raises(UserError, match=r"seed-0 holds the result of c seed 1: was it moved or"):
        recorded_runs(cell, [0, 1])


def test_folders_of_other_names_are_not_stacks(cell: Path):
    for name in ("0-0.bak", "5", "seed", "3-2", "2-3"):
        (cell / "stacks" / name).mkdir(parents=True)
        (cell / "stacks" / name / "last.ckpt").touch()
    assert stacks_of(cell, [0, 1, 2, 3, 5]) == [[0, 1], [2, 3], [5]]


def test_file_in_the_place_of_a_run_is_named(cell: Path):
    seed_dir(cell, 0).touch()
    with pytest.raises(UserError, match="seed-0 is a file"):
        recorded_runs(cell, [0])
