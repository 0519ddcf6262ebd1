from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.records.files import FileLock, is_held

HOLD = """
import sys
from pathlib import Path
from normexp.records.files import FileLock
print(FileLock(Path(sys.argv[1])).acquire(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


def start_holder(path: Path) -> subprocess.Popen[str]:
    """A process that tries to take the lock, prints whether it did, and waits."""
    command = [sys.executable, "-c", HOLD, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()  # SIGKILL
    process.communicate()


def test_second_process_cannot_take_it_until_the_holder_is_killed(path: Path):
    holder = start_holder(path)
    try:
        assert answer(holder) == "True"
        lock = FileLock(path)
        assert lock.acquire() is False
        assert lock.holder() == holder.pid
    finally:
        end(holder)
    assert path.exists()  # left behind, and holds nothing
    assert lock.acquire() is True
    assert lock.holder() == os.getpid()
    lock.release()


def test_other_process_is_refused_while_held_and_taken_after_release(path: Path):
    with FileLock(path) as held:
        assert held
        refused = start_holder(path)
        try:
            assert answer(refused) == "False"
        finally:
            end(refused)
    taker = start_holder(path)
    try:
        assert answer(taker) == "True"
    finally:
        end(taker)


def test_two_locks_in_one_process_exclude_each_other(path: Path):
    with FileLock(path) as first, FileLock(path) as second:
        assert (first, second) == (True, False)
    with FileLock(path) as again:
        assert again


def test_release_leaves_nothing_and_may_be_repeated(path: Path):
    lock = FileLock(path)
    assert lock.acquire()
    lock.release()
    lock.release()
    assert list(path.parent.iterdir()) == []
    assert lock.holder() is None


def test_lock_on_a_removed_file_does_not_pass_for_one_on_its_successor(path: Path):
    """The stack directory goes when its runs have ended, with the lock in it."""
    old = FileLock(path)
    assert old.acquire()
    path.unlink()
    with FileLock(path) as new:
        assert new
        old.release()
        assert path.exists()
        assert not FileLock(path).acquire()


def test_lock_whose_file_vanishes_between_open_and_flock_is_taken_anew(path: Path, monkeypatch):
    real_open = os.open
    calls = []

    def open_and_lose(file: Path, flags: int, mode: int) -> int:
        descriptor = real_open(file, flags, mode)
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    lock = FileLock(path)
    assert lock.acquire()
    assert len(calls) == 2
    assert path.read_text() == str(os.getpid())
    lock.release()


def test_question_whether_it_is_held_creates_and_takes_nothing(path: Path):
    assert not is_held(path)
    assert not path.exists()
    lock = FileLock(path)
    with lock as held:
        assert held
        assert is_held(path)
        assert lock.holder() == os.getpid()
    path.write_text("123")  # what a killed holder leaves
    assert not is_held(path)
    assert path.read_text() == "123"


def test_lock_file_that_may_not_be_opened_is_named(path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    for ask in (lambda: is_held(path), FileLock(path).acquire):
        with pytest.raises(UserError, match=f"{path}: Permission denied; it is the lock"):
            ask()
