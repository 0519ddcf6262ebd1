"""Atomic writes, appended lines and locks: whatever dies, a reader sees whole files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.records import files
from normexp.records.files import (
    appending,
    ensure_writable,
    file_lock,
    full_disk_message,
    holder_of,
    open_atomic,
    read_json,
    read_lines,
    remove_leftovers,
    write_json,
    write_text,
)


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch, call):
    path = tmp_path / "result.json"
    write_text(path, "old")
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_is_replaced_when_the_block_ends_and_not_before(tmp_path: Path):
    path = tmp_path / "weights.pt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), open_atomic(path) as file:
        file.write(b"half of the ne")
        raise KeyboardInterrupt
    with open_atomic(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path: Path):
    (tmp_path / "notes.tmp").touch()
    context = open_atomic(tmp_path / "result.json")
    file = context.__enter__()  # as if killed here
    assert len(list(tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.tmp"]
    file.close()


def test_json_has_no_nan_and_no_half_file(tmp_path: Path):
    path = tmp_path / "evaluation.json"
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json(path, {"val/loss": value})
    assert list(tmp_path.iterdir()) == []
    write_json(path, {"text": "größer \udcff"})
    assert json.loads(path.read_text()) == read_json(path) == {"text": "größer \udcff"}


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"[1]", b"\xff\xfe", None])
def test_json_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_json(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def append(path: Path, *added: str) -> None:
    with appending(path) as lines:
        lines += added


def test_torn_last_line_is_not_read_and_is_cut_by_the_next_writer(tmp_path: Path):
    path = tmp_path / "lines"
    append(path, "one", "two")
    for torn in (b"thr", b"\xff\xfe", b""):
        path.write_bytes(b"one\ntwo\n" + torn)
        assert read_lines(path) == ["one", "two"]
        append(path, "three")
        assert path.read_bytes() == b"one\ntwo\nthree\n"
    path.write_bytes(b"torn from the start")
    append(path, "one")
    assert path.read_bytes() == b"one\n"


def test_full_disk_leaves_the_lines_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "lines"
    append(path, "one")
    real_write, calls = os.write, []

    def fill_up(descriptor: int, content: bytes) -> int:
        calls.append(content)
        if len(calls) > 1:
            no_space()
        return real_write(descriptor, content[:3])

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(OSError, match="No space left"):
        append(path, "two and more")
    assert path.read_bytes() == b"one\n"


def test_full_disk_is_found_behind_other_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for code in (errno.ENOSPC, errno.EDQUOT):
        error = RuntimeError("could not be saved")
        error.__cause__ = OSError(code, "no room")
        assert f"full below {tmp_path}" in str(full_disk_message(error, tmp_path))
    torn = RuntimeError("unexpected pos 64 vs 0")  # torch does not say ENOSPC
    assert full_disk_message(torn, tmp_path / "not" / "there") is None
    assert full_disk_message(OSError(errno.EACCES, "denied"), tmp_path) is None
    monkeypatch.setattr(files, "LEAST_FREE", 2**80)
    assert full_disk_message(torn, tmp_path / "not" / "there") is not None
    assert full_disk_message(ValueError("a mistake"), tmp_path) is None


def test_ensure_writable_creates_nothing_and_names_the_key(tmp_path: Path, monkeypatch):
    ensure_writable(tmp_path / "runs" / "study")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^runs_dir=.*file/runs .*runs_dir="):
        ensure_writable(tmp_path / "file" / "runs")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match="runs_dir=.*Read-only file system"):
        ensure_writable(tmp_path / "data")


# --- Locks ---------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from normexp.records.files import file_lock
with file_lock(Path(sys.argv[1])) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def start_holder(path: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts a process that tries to take the lock; yields whether it holds the lock."""
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_lock_excludes_other_processes_until_its_holder_is_killed(tmp_path: Path):
    path = tmp_path / ".lock"
    holder, has_lock = start_holder(path)
    try:
        assert has_lock == "True"
        with file_lock(path) as held:
            assert not held
        assert holder_of(path) == holder.pid
    finally:
        kill(holder)
    assert path.exists() and holder_of(path) is None  # the file is left and locks nothing
    with file_lock(path) as held:
        assert held and path.read_text() == str(os.getpid())
        refused, has_lock = start_holder(path)
        kill(refused)
        assert has_lock == "False"
    assert list(tmp_path.iterdir()) == []
    assert holder_of(path) is None


def test_lock_on_a_removed_file_is_no_lock_on_its_successor(tmp_path: Path, monkeypatch):
    path = tmp_path / ".lock"
    old = file_lock(path)
    assert old.__enter__()
    path.unlink()
    with file_lock(path) as new:
        assert new
        old.__exit__(None, None, None)
        with file_lock(path) as other:
            assert not other
    real_open, calls = os.open, []

    def open_and_lose(file: Path, flags: int, mode: int) -> int:
        """The last holder removes the file between our open and our lock."""
        calls.append(real_open(file, flags, mode))
        if len(calls) == 1:
            path.unlink()
        return calls[-1]

    monkeypatch.setattr(os, "open", open_and_lose)
    with file_lock(path) as held:
        assert held and len(calls) == 2
        assert path.read_text() == str(os.getpid())


def test_lock_file_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / ".lock"
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(UserError, match=f"{path}: Permission denied"):
        file_lock(path).__enter__()
