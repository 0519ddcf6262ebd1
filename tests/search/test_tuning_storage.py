"""A storage that is locked, torn or no storage at all."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import optuna
import pytest

from normexp.errors import UserError
from normexp.search.storage import open_storage


def names_in(folder: Path, setting: str | None = None) -> list[str]:
    with open_storage(setting, folder) as storage:
        return optuna.get_all_study_names(storage)


def fill(folder: Path) -> Path:
    with open_storage(None, folder) as storage:
        optuna.create_study(storage=storage, study_name="kept")
    return folder / "optuna.journal"


def test_second_process_is_told_who_searches(tmp_path: Path):
    with open_storage(None, tmp_path), pytest.raises(UserError, match="is locked: process"):
        names_in(tmp_path)
    assert names_in(tmp_path) == []  # and the lock is gone


def test_line_that_a_killed_process_tore_is_cut_off(tmp_path: Path):
    journal = fill(tmp_path)
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"wor')
    assert names_in(tmp_path) == ["kept"]
    assert journal.read_bytes() == whole


@pytest.mark.parametrize("content", ["hello\n", '{"op_code":77,"worker_id":"a"}\n', "notes"])
def test_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, content: str):
    journal = tmp_path / "optuna.journal"
    journal.write_text(content)
    with pytest.raises(UserError, match="cannot be used as Optuna's storage"):
        names_in(tmp_path)
    assert journal.read_text() == content


def test_server_is_not_offered(tmp_path: Path):
    with pytest.raises(UserError, match="give a file of a journal"):
        names_in(tmp_path, "postgresql://host/db")


@pytest.mark.slow
def test_sqlite_that_another_process_locks_is_one_message(tmp_path: Path):
    setting = f"sqlite:///{tmp_path}/trials.db"
    assert names_in(tmp_path, setting) == []
    connection = sqlite3.connect(tmp_path / "trials.db")
    connection.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(UserError, match=r"database is locked\); wait for it"):
            names_in(tmp_path, setting)
    finally:
        connection.close()
