"""Which errors are those of a full disk, however they are wrapped."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from normexp.cells import recorded as disk
from normexp.cells.recorded import full_disk


def wrapped(inner: Exception) -> Exception:
    try:
        try:
            raise inner
        except OSError as error:
            raise RuntimeError("could not be saved") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_found_behind_other_errors(tmp_path: Path, code: int):
    message = full_disk(wrapped(OSError(code, "no room")), tmp_path)
    assert message is not None
    assert message.startswith(f"the disk is full below {tmp_path}")


def test_other_errors_are_not_a_full_disk(tmp_path: Path):
    assert full_disk(wrapped(OSError(errno.EACCES, "denied")), tmp_path) is None
    assert full_disk(RuntimeError("no more"), tmp_path / "not" / "there") is None


def test_error_of_torch_on_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "_free", lambda _: 100)
    assert full_disk(RuntimeError("unexpected pos 64 vs 0"), tmp_path) is not None
    assert full_disk(ValueError("a mistake of ours"), tmp_path) is None
