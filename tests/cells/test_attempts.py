"""The runs of a cell on disk: what is missing, in which stacks, and how failures are recorded."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from normexp.cells.attempts import (
    full_disk,
    read_records,
    record_death,
    record_failure,
    stacks_of,
)

from normexp.cells import attempts as attempts_module
from normexp.config.spec import Outcome
from normexp.errors import UserError
from normexp.records.files import FileLock
from normexp.records.paths import LOCK_FILE, seed_dir, stack_dir
from normexp.records.result import Result, Status, read_result, write_result


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    folder = tmp_path / "c"
    folder.mkdir()
    return folder


def write(cell: Path, seed: int, status: Status, attempts: int = 1) -> None:
    seed_dir(cell, seed).mkdir(parents=True)
    error = "why" if status == "failed" else None
    result = Result("c", seed, status, {}, {}, {}, error=error, attempts=attempts)
    write_result(seed_dir(cell, seed), result)


def begun(cell: Path, seeds: list[int]) -> Outcome:
    return Outcome("running", "batch", "c", cell, {"norm": "batch"}, missing=seeds)


@pytest.mark.parametrize(
    ("retry_failed", "max_attempts", "missing"),
    [(True, 3, [1, 3]), (True, 4, [1, 2, 3]), (False, 3, [3]), (True, 1, [3])],
)
def test_failed_runs_are_tried_again_up_to_the_limit(
    cell: Path, retry_failed: bool, max_attempts: int, missing: list[int]
):
    write(cell, 0, "finished")
    write(cell, 1, "failed", attempts=1)
    write(cell, 2, "failed", attempts=3)
    records = read_records(cell, [0, 1, 2, 3])
    assert [run.seed for run in records.ended] == [0]
    assert missing == records.missing(retry_failed=retry_failed, max_attempts=max_attempts)


def test_interrupted_stacks_keep_their_seeds_together(cell: Path):
    for first, last in [(2, 3), (5, 6), (8, 9)]:
        stack_dir(cell, first, last).mkdir(parents=True)
    (stack_dir(cell, 2, 3) / "last.ckpt").touch()
    (stack_dir(cell, 5, 6) / "last.ckpt").touch()  # seed 6 is not asked for
    assert stacks_of(cell, [0, 1, 2, 3, 4, 5, 8, 9]) == [[0, 1], [2, 3], [4, 5], [8, 9]]


def test_attempts_add_up(cell: Path):
    write(cell, 0, "failed", attempts=2)
    record_failure(begun(cell, [0, 1]), [0, 1], "again")
    assert [read_result(seed_dir(cell, seed)).attempts for seed in (0, 1)] == [3, 1]


def test_death_is_recorded_for_unended_runs_alone(cell: Path):
    write(cell, 0, "finished")
    results = record_death(begun(cell, [0, 1]), [0, 1], "killed")
    assert [run.status for run in results] == ["finished", "failed"]
    assert read_result(seed_dir(cell, 1)).error == "killed"


def test_death_is_not_recorded_where_somebody_else_trains_by_now(cell: Path):
    with FileLock(cell / LOCK_FILE) as held:
        assert held
        assert record_death(begun(cell, [0]), [0], "killed") == []
    assert not seed_dir(cell, 0).exists()


def test_folders_of_other_names_are_not_stacks(cell: Path):
    for name in ("0-0.bak", "5", "seed", "3-2", "2-3"):
        (cell / "stacks" / name).mkdir(parents=True)
        (cell / "stacks" / name / "last.ckpt").touch()
    assert stacks_of(cell, [0, 1, 2, 3, 5]) == [[0, 1], [2, 3], [5]]


def test_result_of_another_run_and_file_in_place_of_a_run_are_named(cell: Path):
    write(cell, 1, "finished")
    seed_dir(cell, 0).mkdir()
    shutil.copy(seed_dir(cell, 1) / "result.json", seed_dir(cell, 0))
    with pytest.raises(UserError, match=r"seed-0 holds the result of cell c, seed 1"):
        read_records(cell, [0, 1])
    seed_dir(cell, 2).touch()
    with pytest.raises(UserError, match="seed-2 is a file"):
        read_records(cell, [2])


def test_full_disk_is_found_behind_other_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for code in (errno.ENOSPC, errno.EDQUOT):
        error = RuntimeError("could not be saved")
        error.__cause__ = OSError(code, "no room")
        message = full_disk(error, tmp_path)
        assert message is not None and f"full below {tmp_path}" in message
    assert full_disk(OSError(errno.EACCES, "denied"), tmp_path) is None
    assert full_disk(RuntimeError("no more"), tmp_path / "not" / "there") is None
    monkeypatch.setattr(attempts_module, "_free", lambda _: 100)  # torch does not say ENOSPC
    assert full_disk(RuntimeError("unexpected pos 64 vs 0"), tmp_path) is not None
    assert full_disk(ValueError("a mistake"), tmp_path) is None
