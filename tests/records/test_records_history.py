"""study.jsonl: commands and cells, merged from lines that are only ever appended."""

from __future__ import annotations

import json
import multiprocessing
import os
from datetime import datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.records.history import (
    AttemptEntry,
    CacheEntry,
    CellEntry,
    CellHistory,
    CommandEntry,
    SearchEntry,
    append_entries,
    read_history,
)

COMMAND = CommandEntry(["normexp-train", "größer\u2028\x85", "line\nbreak"], "0123", {"d1": [0, 1]})
ASKED = CellEntry("d1", "norm=batch", [0, 1])
ROUNDS = 40


def only_cell(study: Path) -> CellHistory:
    (cell,) = read_history(study).cells.values()
    return cell


def append_many(study: Path, name: str, barrier: Barrier) -> None:
    barrier.wait()
    for number in range(ROUNDS):
        command = CommandEntry([name, "x" * 5000, str(number)], "0123", {})
        append_entries(study, [command, CellEntry(f"{number}", "cell", [0], name)])


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
    assert len(history.cells) == ROUNDS


def test_entries_come_back_with_every_value(tmp_path: Path):
    attempt = AttemptEntry("s1", "no more", died=True, checkpointed_at=7)
    key = CacheEntry("d1", "k", "a", ["/own"], {"precise": 64})
    searches = [SearchEntry("s", ["x"], ["lr"], "val/loss", points) for points in (["a"], ["b"])]
    append_entries(tmp_path, [COMMAND, attempt, key, *searches])
    history = read_history(tmp_path)
    assert (history.commands, history.attempts) == ([COMMAND], [attempt])
    assert history.cache == {"d1": [key]}
    assert [*history.searches.values()] == searches[1:]  # the longer search of the same space
    assert datetime.fromisoformat(history.commands[0].time).utcoffset() is not None


def test_lines_of_an_earlier_version_are_read(tmp_path: Path):
    key = {"digest": "d1", "key": "k", "cell_id": "a", "sources": [], "evaluated": True}
    command = {"time": "t", "command": ["c"], "grid": {"lr": [1]}, "code_version": "0", "cells": {}}
    lines = [json.dumps(line) + "\n" for line in (key, command)]
    (tmp_path / "study.jsonl").write_text("".join(lines))
    history = read_history(tmp_path)
    assert history.cache["d1"][0].evaluated == {}
    assert history.commands[0].command == ["c"]


def test_entries_of_one_cell_add_up_and_the_latest_error_counts(tmp_path: Path):
    append_entries(tmp_path, [ASKED, CellEntry("d1", "norm=batch", [0, 1], error="5, 6\ndo not")])
    assert only_cell(tmp_path).error == "5, 6\ndo not"
    append_entries(tmp_path, [CellEntry("d1", "norm=batch", [2], cell_id="batch-1")])
    cell = only_cell(tmp_path)
    assert (cell.seeds, cell.cell_id, cell.error) == ({0, 1, 2}, "batch-1", "")


def test_ids_of_an_edited_cell_are_kept(tmp_path: Path):
    for cell_id in ("own-1", "own-2", "own-2"):
        append_entries(tmp_path, [CellEntry("d1", "norm=own", [0], cell_id=cell_id)])
    assert (only_cell(tmp_path).cell_id, only_cell(tmp_path).earlier_ids) == ("own-2", {"own-1"})
    append_entries(tmp_path, [CellEntry("d1", "norm=own", [0], cell_id="own-1")])  # edited back
    assert (only_cell(tmp_path).cell_id, only_cell(tmp_path).earlier_ids) == ("own-1", {"own-2"})


def test_known_entries_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = CacheEntry("d1", "k", "a", [])
    entries = [ASKED, CellEntry("d1", "norm=batch", [0, 1], cell_id="batch-1"), key]
    append_entries(tmp_path, entries)
    before = (tmp_path / "study.jsonl").read_bytes()

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)  # a study that is only read need not be writable
        append_entries(tmp_path, [*entries, ASKED])
        with pytest.raises(PermissionError):
            append_entries(tmp_path, [CellEntry("d2", "norm=layer", [0])])
    assert (tmp_path / "study.jsonl").read_bytes() == before
    append_entries(tmp_path, [*entries, CellEntry("d0", "norm=none", [0])])
    assert len((tmp_path / "study.jsonl").read_bytes().splitlines()) == len(entries) + 1


TYPED = '{"time": "t", "command": ["c"], "code_version": 123, "cells": {}}'


@pytest.mark.parametrize(
    "line", ["my own notes", "[1]", '{"command": 3}', '{"digest": "d"}', '{"a": 1}', "3", TYPED]
)
def test_line_that_was_edited_by_hand_is_named(tmp_path: Path, line: str):
    append_entries(tmp_path, [COMMAND])
    with (tmp_path / "study.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"study\.jsonl line 2"):
        read_history(tmp_path)
