"""A study that this process cannot write, as on a read-only file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from train_cases import cells, files, train

from normexp import evaluate, report, status
from normexp.training.records import files as record_files


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "somewhere")


def test_a_study_that_cannot_be_written_is_shown_and_not_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert train(tmp_path, "norm=layer") == 0
    before = files(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    for name in ("tempfile.mkdtemp", "tempfile.TemporaryFile", "filelock.FileLock.acquire"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr(record_files, "open_atomic", refuse)
    capsys.readouterr()
    assert train(tmp_path, "norm=layer") == 0
    assert "already recorded" in capsys.readouterr().out
    assert train(tmp_path, "norm=layer", "seed=5") == 2
    assert "cannot be written (Read-only file system" in capsys.readouterr().err
    where = f"runs_dir={tmp_path / 'runs'}"
    assert status.main(["study=default", where]) == report.main(["study=default", where]) == 0
    said = capsys.readouterr()
    assert "layer" in said.out and "no page: " in said.err
    assert evaluate.main([f"run={cells(tmp_path)[0]}"]) == 2
    assert "name another folder with run=" in capsys.readouterr().err  # before anything is computed
    assert files(tmp_path) == before
