"""The results of a cell: what is missing and what may be tried again; a disk that is full."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.records import files
from normexp.records.files import full_disk
from normexp.records.paths import seed_dir
from normexp.records.result import Result, Status, read_records, write_result


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
    assert [run.seed for run in records.all] == [0, 1, 2]
    assert missing == records.missing(retry_failed=retry_failed, max_attempts=max_attempts)


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
    monkeypatch.setattr(files, "_free", lambda _: 100)  # torch does not say ENOSPC
    assert full_disk(RuntimeError("unexpected pos 64 vs 0"), tmp_path) is not None
    assert full_disk(ValueError("a mistake"), tmp_path) is None
