"""study.jsonl: commands and cells, merged from lines that are only ever appended."""

from __future__ import annotations

import json
import multiprocessing
import os
from datetime import datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from normexp.errors import UserError
from normexp.records.history import (
    CellEntry,
    CellHistory,
    append_cells,
    append_command,
    read_history,
)

COMMAND = ["normexp-train", "-m", "norm=batch,group", "lr=1e-5"]
ASKED = CellEntry("d1", "norm=batch", [0, 1])
ROUNDS = 40


def only_cell(study: Path) -> CellHistory:
    (cell,) = read_history(study).cells.values()
    return cell


def append_many(study: Path, name: str, barrier: Barrier) -> None:
    barrier.wait()
    for number in range(ROUNDS):
        append_command(study, [name, "x" * 5000], {"number": number}, "0123")
        append_cells(study, [CellEntry(f"{number}", "cell", [0], name)])


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
        worker.join(timeout=60)
        assert worker.exitcode == 0
    history = read_history(tmp_path)
    assert len(history.commands) == 2 * ROUNDS
    for name in names:
        numbers = [each.grid["number"] for each in history.commands if each.command[0] == name]
        assert numbers == list(range(ROUNDS))
    assert len(history.cells) == ROUNDS


def test_command_comes_back_with_every_value(tmp_path: Path):
    grid: dict[str, Any] = {
        "lr": [1e-5, 1e22, 0.1, -1.5e-7, 1.0, 3],
        "text": ["yes", "größer\u2028\x85\x7f", "a: b # c", 'quote"\\', "line\nbreak", "😀"],
        "nested": {"none": None, "true": True, "empty": {}, "list": []},
    }
    append_command(tmp_path, COMMAND, grid, "0123", {"d1": [0, 1]})
    append_command(tmp_path, [], {}, "4567")
    first, second = read_history(tmp_path).commands
    assert (first.command, first.grid, first.code_version) == (COMMAND, grid, "0123")
    assert [type(value) for value in first.grid["lr"]] == [float] * 5 + [int]
    assert first.cells == {"d1": [0, 1]}
    assert datetime.fromisoformat(first.time).utcoffset() is not None
    assert second.command == []


@pytest.mark.parametrize("evaluated", [{}, {"evaluated": True}, {"evaluated": False}])
def test_key_of_an_earlier_version_is_read(tmp_path: Path, evaluated: dict[str, bool]):
    line = {"digest": "d1", "key": "k", "cell_id": "a", "sources": [], **evaluated}
    (tmp_path / "study.jsonl").write_text(json.dumps(line) + "\n")
    (key,) = read_history(tmp_path).keys["d1"]
    assert (key.key, key.cell_id, key.evaluated) == ("k", "a", {})


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_value_that_is_not_plain_is_refused_before_writing(tmp_path: Path, value: object):
    with pytest.raises((ValueError, TypeError)):
        append_command(tmp_path, [], {"x": value}, "0123")
    assert list(tmp_path.iterdir()) == []


def test_entries_of_one_cell_add_up_and_the_latest_error_counts(tmp_path: Path):
    append_cells(tmp_path, [ASKED, CellEntry("d1", "norm=batch", [0, 1], error="5, 6\ndo not")])
    assert only_cell(tmp_path).error == "5, 6\ndo not"
    append_cells(tmp_path, [CellEntry("d1", "norm=batch", [2], cell_id="batch-1")])
    cell = only_cell(tmp_path)
    assert (cell.seeds, cell.cell_id, cell.error) == ({0, 1, 2}, "batch-1", "")


def test_ids_of_an_edited_cell_are_kept(tmp_path: Path):
    for cell_id in ("own-1", "own-2", "own-2"):
        append_cells(tmp_path, [CellEntry("d1", "norm=own", [0], cell_id=cell_id)])
    assert (only_cell(tmp_path).cell_id, only_cell(tmp_path).earlier_ids) == ("own-2", {"own-1"})
    append_cells(tmp_path, [CellEntry("d1", "norm=own", [0], cell_id="own-1")])  # edited back
    assert (only_cell(tmp_path).cell_id, only_cell(tmp_path).earlier_ids) == ("own-1", {"own-2"})


def test_known_entries_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entries = [ASKED, CellEntry("d1", "norm=batch", [0, 1], cell_id="batch-1")]
    append_cells(tmp_path, entries)
    before = (tmp_path / "study.jsonl").read_bytes()

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # a study that is only read need not be writable
    append_cells(tmp_path, [*entries, ASKED])
    assert (tmp_path / "study.jsonl").read_bytes() == before
    monkeypatch.undo()
    append_cells(tmp_path, [*entries, CellEntry("d0", "norm=none", [0])])
    assert len((tmp_path / "study.jsonl").read_bytes().splitlines()) == len(before.splitlines()) + 1
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError):
        append_cells(tmp_path, [CellEntry("d2", "norm=layer", [0])])


def test_line_that_a_killed_writer_tore_is_ignored_and_then_cut(tmp_path: Path):
    append_command(tmp_path, ["first"], {}, "0123")
    append_cells(tmp_path, [ASKED])
    path = tmp_path / "study.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time": "2026", "command": ["seco')
    history = read_history(tmp_path)
    assert ([each.command for each in history.commands], list(history.cells)) == (
        [["first"]],
        ["d1"],
    )
    append_command(tmp_path, ["third"], {}, "0123")
    commands = [each.command for each in read_history(tmp_path).commands]
    assert commands == [["first"], ["third"]]


@pytest.mark.parametrize(
    "line",
    ["my own notes", "[1]", '{"command": 3}', '{"digest": "d"}', '{"a": 1}', "3"],
)
def test_line_that_was_edited_by_hand_is_named(tmp_path: Path, line: str):
    assert read_history(tmp_path).commands == []
    append_command(tmp_path, COMMAND, {}, "0123")
    with (tmp_path / "study.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"study\.jsonl line 2"):
        read_history(tmp_path)


def test_value_of_another_type_is_named_with_its_line(tmp_path: Path):
    append_command(tmp_path, COMMAND, {}, "0123")
    path = tmp_path / "study.jsonl"
    path.write_text(path.read_text().replace('"0123"', "123"))
    with pytest.raises(UserError, match=r"study\.jsonl line 1"):
        read_history(tmp_path)
