from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.records.files import (
    ensure_writable,
    open_atomic,
    remove_leftovers,
    write_config,
    write_json,
    write_text,
)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch, call):
    path = tmp_path / "result.json"
    write_text(path, "old")
    monkeypatch.setattr(os, call, full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_exception_in_the_middle_of_writing_keeps_the_old_file(tmp_path: Path):
    path = tmp_path / "weights.pt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), open_atomic(path) as file:
        file.write(b"half of the ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_reader_sees_the_old_file_until_the_block_ends(tmp_path: Path):
    path = tmp_path / "weights.pt"
    write_text(path, "old")
    with open_atomic(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_written_file_has_the_usual_permissions(tmp_path: Path):
    (tmp_path / "usual").touch()
    write_text(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_leftovers_of_killed_writers_go_and_nothing_else_does(tmp_path: Path):
    write_config(tmp_path, "lr: 0.1\n")
    kept = tmp_path / "notes.tmp"
    kept.touch()
    context = open_atomic(tmp_path / "result.json")
    file = context.__enter__()  # as if killed here
    assert len(list(tmp_path.iterdir())) == 3
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "notes.tmp"]
    file.close()


def test_json_has_no_nan_and_no_half_file(tmp_path: Path):
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json(tmp_path / "evaluation.json", {"val/loss": value})
    assert list(tmp_path.iterdir()) == []
    write_json(tmp_path / "evaluation.json", {"text": "größer \udcff"})
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content == {"text": "größer \udcff"}


def test_ensure_writable_creates_nothing(tmp_path: Path):
    ensure_writable(tmp_path)
    ensure_writable(tmp_path / "runs" / "study")
    assert list(tmp_path.iterdir()) == []


def test_ensure_writable_refuses_a_file_in_the_way(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^runs_dir=.*file/runs cannot be written .*runs_dir="):
        ensure_writable(tmp_path / "file" / "runs")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ensure_writable_refuses_a_read_only_file_system(tmp_path: Path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match="data_dir=.*Read-only file system"):
        ensure_writable(tmp_path / "data", key="data_dir")
    assert list(tmp_path.iterdir()) == []
