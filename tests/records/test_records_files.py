"""Atomic writes and locks: whatever dies, a reader sees whole files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.training.records import files, locks
from normexp.training.records.files import (
    ensure_writable,
    is_full_disk,
    open_atomic,
    read_json,
    write_json,
    write_text,
)
from normexp.training.records.locks import file_lock, holder_of, one_at_a_time, this_command


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
    (tmp_path / ".weights.pt.0123abcd.tmp").write_bytes(b"half of the ne")  # of a killed writer
    with open_atomic(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]  # also what the killed writer left has gone


def test_writers_at_once_do_not_mix(tmp_path: Path):
    path = tmp_path / "images.pt"
    with open_atomic(path) as first:
        first.write(b"a long text")
        with open_atomic(path) as second:
            second.write(b"short")
        assert path.read_bytes() == b"short"
    assert path.read_bytes() == b"a long text"
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_no_nan_and_no_half_file(tmp_path: Path):
    path = tmp_path / "evaluation.json"
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json(path, {"val/loss": value})
    assert list(tmp_path.iterdir()) == []
    write_json(path, {"text": "größer"})
    assert json.loads(path.read_text()) == read_json(path) == {"text": "größer"}


@pytest.mark.parametrize("content", [b'{"a": 1', b"", b"[1]", b"\xff\xfe", None])
def test_json_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_json(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_full_disk_is_found_behind_other_errors():
    for code in (errno.ENOSPC, errno.EDQUOT):
        error = RuntimeError("could not be saved")
        error.__cause__ = OSError(code, "no room")
        assert is_full_disk(error)
    assert not is_full_disk(OSError(errno.EACCES, "denied"))
    if os.path.exists("/dev/full"):
        import torch

        with pytest.raises(OSError, match="No space") as caught, open("/dev/full", "wb") as file:
            torch.save(torch.zeros(10_000), file)
        assert is_full_disk(caught.value)


def test_ensure_writable_creates_nothing_and_names_the_key(tmp_path: Path):
    ensure_writable(tmp_path / "runs" / "study")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/runs cannot .* with runs_dir="):
        ensure_writable(tmp_path / "file" / "runs")


def lock_nothing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, 524])
def test_a_folder_without_file_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    lock_nothing(monkeypatch, number)
    with pytest.raises(UserError, match=f"{tmp_path} has no file locks"):
        ensure_writable(tmp_path)


def test_an_error_of_a_lock_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock_nothing(monkeypatch, errno.ENOLCK)
    with pytest.raises(OSError, match="No locks available") as caught, file_lock(tmp_path / "a"):
        pass
    assert caught.value.filename == str(tmp_path / "a")


def test_a_lock_of_another_machine_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "lock"
    for holder in (this_command(), "process 1 (train norm=group) on node7"):
        path.write_text(holder)  # left by a command that was killed, or that trains elsewhere
        with file_lock(path) as held:
            assert held
    (record,) = caplog.records
    assert record.getMessage().startswith("process 1 (train norm=group) on node7 was killed, or")


HOLD = """
import sys
from pathlib import Path
from normexp.training.records.locks import file_lock
with file_lock(Path(sys.argv[1])) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def start_holder(path: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts a process that tries to take the lock; returns whether it holds the lock."""
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
        assert holder_of(path).startswith(f"process {holder.pid} (")
    finally:
        kill(holder)
    assert holder_of(path) == "" and path.exists()  # it locks nothing; reading changes nothing
    with file_lock(path) as held:
        assert held and path.read_text() == this_command()
        refused, has_lock = start_holder(path)
        kill(refused)
        assert has_lock == "False"
    assert list(tmp_path.iterdir()) == []


def test_windows_replaces_a_file_once_it_is_closed(tmp_path: Path, monkeypatch):
    """It has no fcntl, and a file that is open there can be neither replaced nor removed."""
    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(locks, "fcntl", None)
    replace, opened = os.replace, []

    def move(old: Path, new: Path) -> None:
        assert opened[0].closed
        replace(old, new)

    monkeypatch.setattr(os, "replace", move)
    (tmp_path / ".weights.pt.0123.tmp").touch()  # of a killed process
    ensure_writable(tmp_path)
    with open_atomic(tmp_path / "weights.pt") as file:
        opened.append(file)
        file.write(b"all")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("weights.pt", b"all")
    ]
    lock = tmp_path / ".lock"
    with file_lock(lock) as is_mine, file_lock(lock) as is_mine_too:
        assert is_mine and not is_mine_too
        assert lock.read_text() == "" == holder_of(lock)  # a lock keeps others from reading
    monkeypatch.delattr(os, "getuid")
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with one_at_a_time("weights"):
        assert (tmp_path / "normexp-me-weights").is_file()


def test_what_several_want_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    downloads, found = [], tmp_path / "found"

    def want(_: int) -> None:
        with one_at_a_time("weights"):
            if not found.exists():
                time.sleep(0.02)  # where others would begin, too
                downloads.append(1)
                found.touch()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(want, range(4)))
    assert len(downloads) == 1 and [*tmp_path.iterdir()] == [found]
