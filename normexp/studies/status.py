"""What a study has, lacks and failed, read from its files alone: at once, and without torch."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.index import Asked, read_index
from normexp.records.layout import (
    CHECKPOINT_FILE,
    LOCK_FILE,
    METRICS_FILE,
    RESULT_FILE,
    Study,
    list_seeds,
    seed_dir,
)
from normexp.records.lock import StackLock, is_held
from normexp.records.metrics import read_metrics
from normexp.records.reader import find_study, read_result
from normexp.records.shared import interrupted_stacks
from normexp.records.study_file import read_commands

STATES = ("finished", "diverged", "failed", "running", "interrupted", "not started", "unreadable")


@dataclass
class CellStatus:
    """One cell: how many of its runs are in which state, and what there is to say of it.

    Attributes:
        title: as it was asked for, else its id.
        directory: None where it was never begun.
        refused: why it cannot be trained; empty where it can.
        notes: errors of failed runs, the process that trains, how far.
    """

    title: str
    directory: Path | None
    runs: Counter[str] = field(default_factory=Counter)
    refused: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class StudyStatus:
    """A study: its cells and the commands that asked for them."""

    name: str
    root: Path
    cells: list[CellStatus]
    commands: list[dict[str, Any]]

    @property
    def runs(self) -> Counter[str]:
        """Runs by state, over all cells."""
        return sum((cell.runs for cell in self.cells), Counter())

    @property
    def is_complete(self) -> bool:
        """Whether every run that can be trained has ended well."""
        return not any(self.runs[state] for state in STATES[2:])


def read_status(runs_dir: Path, name: str) -> StudyStatus:
    """The status of a study, also while it runs. Raises UserError where there is none."""
    root = find_study(runs_dir, name)
    asked = list(read_index(root).values())
    by_id: dict[str, Asked] = {}
    never_begun = []
    for cell in asked:
        if cell.cell_id:  # sizes that came to one cell are one row
            one = by_id.setdefault(cell.cell_id, Asked(cell.title, cell_id=cell.cell_id))
            one.seeds |= cell.seeds
            one.error = one.error or cell.error
        else:
            never_begun.append(cell)
    for directory in Study(root).list_cells():  # of before the index, or copied here
        by_id.setdefault(directory.name, Asked(directory.name, cell_id=directory.name))
    cells = [_begun(root / cell_id, cell) for cell_id, cell in by_id.items()]
    cells += [_never_begun(cell) for cell in never_begun]
    return StudyStatus(name, root, cells, read_commands(root))


def _never_begun(asked: Asked) -> CellStatus:
    status = CellStatus(asked.title, None, refused=asked.error)
    if not asked.error:
        status.runs["not started"] = len(asked.seeds)
    return status


def _begun(directory: Path, asked: Asked) -> CellStatus:
    status = CellStatus(asked.title, directory)
    on_disk = list_seeds(directory) if directory.is_dir() else []
    is_running = is_held(directory / LOCK_FILE)
    interrupted = _seeds_with_checkpoint(directory)
    errors = []
    for seed in sorted(asked.seeds | set(on_disk)):
        path = seed_dir(directory, seed) / RESULT_FILE
        if path.is_file():
            state, error = _state_of(path)
            errors += [error] if error else []
        elif is_running and seed in on_disk:
            state = "running"
        else:
            state = "interrupted" if seed in interrupted else "not started"
        status.runs[state] += 1
    status.notes += list(dict.fromkeys(errors))
    if is_running:
        status.notes.append(_how_far(directory, on_disk))
    return status


def _state_of(result_file: Path) -> tuple[str, str | None]:
    try:
        result = read_result(result_file)
    except UserError as error:
        return "unreadable", str(error)
    return result.status, result.error


def _seeds_with_checkpoint(directory: Path) -> set[int]:
    seeds: set[int] = set()
    for path in directory.glob(f"stacks/*/{CHECKPOINT_FILE}"):
        first, _, last = path.parent.name.partition("-")
        seeds.update(range(int(first), int(last) + 1))
    for _, members in interrupted_stacks(directory.parent):
        seeds.update(seed for cell_id, seed in members if cell_id == directory.name)
    return seeds


def _how_far(directory: Path, seeds: list[int]) -> str:
    """Who trains the cell, and the step that its last checkpoint holds."""
    told = f"process {StackLock(directory / LOCK_FILE).holder()}"
    steps = []
    for seed in seeds:
        unended = not (seed_dir(directory, seed) / RESULT_FILE).is_file()
        metrics = seed_dir(directory, seed) / METRICS_FILE
        if unended and metrics.is_file():
            with contextlib.suppress(UserError):  # the one who trains will say what is wrong
                steps += [row.step for row in read_metrics(metrics)[-1:]]
    return f"{told}, step {max(steps)} at its last checkpoint" if steps else told
