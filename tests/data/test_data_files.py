from __future__ import annotations

from pathlib import Path

import pytest

from normexp.data.dataset import available_memory, refuse_beyond_memory, whole_file
from normexp.errors import UserError


def test_whole_file_appears_only_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "folder" / "file"
    with whole_file(path) as part:
        part.write_text("content")
        assert not path.exists()
    assert path.read_text() == "content"
    assert list(path.parent.iterdir()) == [path]


def test_interrupted_write_keeps_the_old_file_and_no_part(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_memory_is_refused_above_what_is_available_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("normexp.data.dataset.available_memory", lambda: 2_000_000_000)
    refuse_beyond_memory("data.root=x", 2_000_000_000, "try data.size=32")
    message = "data.root=x needs 2.5 GB of memory, 2.0 GB is available; try data.size=32"
    with pytest.raises(UserError, match=message):
        refuse_beyond_memory("data.root=x", 2_500_000_000, "try data.size=32")
    monkeypatch.setattr("normexp.data.dataset.available_memory", lambda: None)
    refuse_beyond_memory("data.root=x", 10**15, "try data.size=32")


def test_available_memory_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:   5000 kB\n")
    monkeypatch.setattr("normexp.data.dataset._MEMINFO", meminfo)
    assert available_memory() == 5000 * 1024
    meminfo.unlink()
    assert available_memory() is None
