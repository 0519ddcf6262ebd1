"""A study, read from its files: what was asked, and the state of every run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.training.records.journal import (
    CommandEntry,
    Refusal,
    Request,
    append_entry,
    read_entries,
    remove_refused,
)
from normexp.training.records.layout import CHECKPOINT_FILE, STACKS, seed_dir
from normexp.training.records.locks import file_lock
from normexp.training.records.result import Measured, Result, Status, write_result
from normexp.training.records.stack_state import Attempts, lock_of, write_attempts
from normexp.training.records.study import read_study


def command(name: str, cells: dict[str, list[int]], *words: str) -> CommandEntry:
    asked = {cell: Request([f"norm={cell}"], seeds) for cell, seeds in cells.items()}
    return CommandEntry(name, ["normexp-train", *words], "code", asked)


def refusal(cell: str, name: str) -> Refusal:
    return Refusal(cell, f"norm={cell}", [0], name, "a mistake")


def end(study: Path, cell: str, seed: int, status: Status = Status.FINISHED) -> None:
    run_dir = seed_dir(study / cell, seed)
    run_dir.mkdir(parents=True)
    error = "boom" if status is Status.FAILED else None
    step = 3 if status is Status.DIVERGED else None
    measured = Measured(diverged_at_step=step)
    write_result(run_dir, Result(cell, seed, status, {}, {}, measured, error))


def test_a_line_is_written_once_and_lines_by_hand_are_named(tmp_path: Path):
    for _ in range(2):
        append_entry(tmp_path / "s", command("1", {"a": [0, 1]}))
        append_entry(tmp_path / "s", refusal("b", "1"))  # as of two workers that prepare it
    first, second = read_entries(tmp_path / "s")
    assert isinstance(first, CommandEntry) and first.cells["a"].seeds == [0, 1]
    assert second == refusal("b", "1") or second.time
    with open(tmp_path / "s" / "study.jsonl", "a") as file:
        file.write('{"line": "command", "schema": 3, "id": 3}\n')
    with pytest.raises(UserError, match="line 3 was not written by normexp"):
        read_study(tmp_path / "s")


def test_each_run_has_the_state_that_its_files_tell(tmp_path: Path):
    append_entry(tmp_path, command("1", {"a": [0, 1, 2, 3, 4, 5], "b": [0]}))
    end(tmp_path, "a", 0)
    end(tmp_path, "a", 1, Status.DIVERGED)
    end(tmp_path, "a", 2, Status.FAILED)
    end(tmp_path, "a", 3)
    (seed_dir(tmp_path / "a", 3) / "result.json").write_text("{")
    folder = tmp_path / STACKS / "x"
    write_attempts(folder, Attempts([("a", 4)], threads=1))
    (folder / CHECKPOINT_FILE).touch()
    study = read_study(tmp_path)
    states = [Status.FINISHED, Status.DIVERGED, Status.FAILED, Status.UNREADABLE]
    states += [Status.INTERRUPTED, Status.NOT_STARTED]
    assert list(study.cells["a"].states.values()) == states
    assert study.cells["a"].missing == [4, 5] and study.runs[Status.NOT_STARTED] == 2
    assert (
        study.cells["a"].failures[0] == "boom" and "cannot be read" in study.cells["a"].failures[1]
    )
    for seed in (4, 5):
        write_attempts(tmp_path / STACKS / str(seed), Attempts([("a", seed)]))
    with file_lock(lock_of(tmp_path / "a", 5)):
        cell = read_study(tmp_path).cells["a"]
        assert cell.states[4] is Status.INTERRUPTED and cell.states[5] is Status.RUNNING
        assert [bool(stack.holder) for stack in cell.stacks] == [False, True, False]


def test_of_commands_that_are_typed_alike_the_last_one_asks(tmp_path: Path):
    append_entry(tmp_path, command("1", {"a": [0, 1]}, "norm=mine"))
    append_entry(tmp_path, command("2", {"a": [0, 1, 2]}, "norm=a"))
    append_entry(tmp_path, command("3", {"b": [0]}, "norm=mine"))  # its source was edited
    study = read_study(tmp_path)
    assert list(study.cells["a"].states) == [0, 1, 2] and list(study.cells["b"].states) == [0]
    append_entry(tmp_path, command("4", {"c": [0]}, "norm=a"))
    assert list(read_study(tmp_path).cells) == ["b", "c"]  # nobody asks for a, which has no folder


def test_runs_that_were_copied_into_a_study_count(tmp_path: Path):
    append_entry(tmp_path, command("1", {"a": [0, 1]}))
    for cell, seed in (("a", 0), ("a", 1), ("a", 2), ("b", 0)):  # the last two from elsewhere
        end(tmp_path, cell, seed)
    seed_dir(tmp_path / "a", 3).mkdir()
    study = read_study(tmp_path)
    assert list(study.cells["a"].states) == [0, 1, 2] and list(study.cells["b"].states) == [0]


def test_a_refusal_stands_until_another_command_asks_again(tmp_path: Path):
    append_entry(tmp_path, refusal("a", "1"))
    append_entry(tmp_path, command("1", {"a": [0], "b": [0]}))
    assert read_study(tmp_path).refusals["a"].error == "a mistake"
    assert read_study(tmp_path).cells["a"].refused == "a mistake"
    append_entry(tmp_path, command("2", {"a": [0]}))
    assert read_study(tmp_path).refusals == {}


def test_a_study_made_anew_is_read_anew(tmp_path: Path):
    """The new file may have the inode and the size of the one before."""
    append_entry(tmp_path, command("1", {"a": [0]}))
    assert [entry.id for entry in read_entries(tmp_path)] == ["1"]
    file = tmp_path / "study.jsonl"
    with open(file, "r+") as same:
        text = same.read().replace('"id": "1"', '"id": "2"')
        same.seek(0)
        same.write(text)
    os.utime(file, (0, 0))
    assert [entry.id for entry in read_entries(tmp_path)] == ["2"]


def test_a_study_of_refusals_alone_goes_with_its_command(tmp_path: Path):
    append_entry(tmp_path / "s", refusal("a", "1"))
    remove_refused(tmp_path / "s", "2")
    assert (tmp_path / "s").is_dir()
    remove_refused(tmp_path / "s", "1")
    assert list(tmp_path.iterdir()) == []
    append_entry(tmp_path / "s", refusal("a", "1"))
    append_entry(tmp_path / "s", command("3", {"a": [0]}))
    remove_refused(tmp_path / "s", "1")
    assert len(read_entries(tmp_path / "s")) == 2
