"""study.jsonl: commands and what came of them, from lines that are only ever appended."""

from __future__ import annotations

import multiprocessing
from datetime import datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.records.history import (
    AttemptEntry,
    CommandEntry,
    EndEntry,
    SearchEntry,
    append_entries,
    read_history,
)

ASKED = {"batch-1": [("norm=batch", [0, 1]), ("norm=batch norm_batch_size=32", [2])]}
COMMAND = CommandEntry("c1", ["normexp-train", "größer\u2028\x85", "line\nbreak"], "0123", 3, ASKED)
ROUNDS = 40


def append_many(study: Path, name: str, barrier: Barrier) -> None:
    barrier.wait()
    for number in range(ROUNDS):
        command = CommandEntry(f"{name}{number}", [name, "x" * 5000, str(number)], "0123", 3, {})
        append_entries(study, [command])


def test_two_processes_append_without_tearing(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    names = ["first", "second"]
    workers = [
        context.Process(target=append_many, args=(tmp_path, name, barrier)) for name in names
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=600)
        assert worker.exitcode == 0
    history = read_history(tmp_path)
    assert len(history.commands) == 2 * ROUNDS
    for name in names:
        numbers = [each.command[2] for each in history.commands if each.command[0] == name]
        assert numbers == [str(number) for number in range(ROUNDS)]


def test_entries_come_back_with_every_value(tmp_path: Path):
    attempt = AttemptEntry("s1", "no more", died=True, checkpointed_at=7)
    end = EndEntry("batch-1", "norm=batch", [0, 1], "c1", "failed", "no more")
    searches = [SearchEntry("s", ["x"], ["lr"], "val/loss", points) for points in (["a"], ["b"])]
    append_entries(tmp_path, [COMMAND, attempt, end, *searches])
    history = read_history(tmp_path)
    (command,) = history.commands
    assert command.command == COMMAND.command and command.seeds_of("batch-1") == {0, 1, 2}
    assert datetime.fromisoformat(command.time).utcoffset() is not None
    assert (history.attempts, history.ends) == ([attempt], [end])
    assert [*history.searches.values()] == searches[1:]  # the longer search of the same space


def test_a_later_command_reopens_a_cell_that_an_earlier_one_could_not_train(tmp_path: Path):
    end = EndEntry("batch-1", "norm=batch", [0], "c1", "refused", "5, 6\ndo not")
    append_entries(tmp_path, [end, COMMAND])  # before its command, as by another process
    assert read_history(tmp_path).errors == {"batch-1": end}
    append_entries(tmp_path, [CommandEntry("c2", ["again"], "0123", 3, ASKED)])
    assert read_history(tmp_path).errors == {}
    assert read_history(tmp_path).ends == [end]


@pytest.mark.parametrize(
    "line",
    [
        *("my own notes", "[1]", '{"command": 3}', '{"a": 1}', "3"),
        '{"time": "t", "id": "1", "command": ["c"], "code_version": 1, "max_attempts": 1, '
        '"cells": {}}',
    ],
)
def test_line_that_was_edited_by_hand_is_named(tmp_path: Path, line: str):
    append_entries(tmp_path, [COMMAND])
    with (tmp_path / "study.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"study\.jsonl line 2"):
        read_history(tmp_path)
