"""What a study has, lacks and failed, read from its files alone: at once, and without torch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Set
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
from normexp.studies.titles import shared_words

STATES = ("finished", "diverged", "failed", "running", "interrupted", "not started", "unreadable")


@dataclass
class CellStatus:
    """One cell: how many of its runs are in which state, and what there is to say of it.

    Attributes:
        title: what it is, else its id.
        directory: None where it was never begun.
        states: of its runs, by seed.
        digests: what it is called by the commands that asked for it.
        refused: why it cannot be trained; empty where it can.
        notes: errors of failed runs, the process that trains, how far.
    """

    title: str
    directory: Path | None
    states: dict[int, str] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    refused: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> Counter[str]:
        """Runs by state."""
        return Counter(self.states.values())


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

    def unfinished_commands(self) -> list[dict[str, Any]]:
        """Those that asked for a run that has not ended well.

        With those of which that is not known: of older records, and searches, which ask as they go.
        """
        lacking = {
            (digest, seed)
            for cell in self.cells
            for digest in cell.digests
            for seed, state in cell.states.items()
            if state in STATES[2:]
        }
        return [command for command in self.commands if _asks_for(command, lacking)]


def read_status(runs_dir: Path, name: str) -> StudyStatus:
    """The status of a study, also while it runs. Raises UserError where there is none."""
    root = find_study(runs_dir, name)
    by_id: dict[str, dict[str, Asked]] = {}  # sizes that came to one cell are one row
    never_begun = []
    for digest, cell in read_index(root).items():
        if cell.cell_id:
            by_id.setdefault(cell.cell_id, {})[digest] = cell
        else:
            never_begun.append(_never_begun(digest, cell))
    for directory in Study(root).list_cells():  # of before the index, or copied here
        by_id.setdefault(directory.name, {})
    cells = [_begun(root / cell_id, asked) for cell_id, asked in by_id.items()]
    return StudyStatus(name, root, [*cells, *never_begun], read_commands(root))


def _asks_for(command: Mapping[str, Any], lacking: Set[tuple[str, int]]) -> bool:
    asked = command.get("cells")
    if asked is None or command.get("command", [""])[0] == "normexp-tune":
        return bool(lacking)
    return any((digest, seed) in lacking for digest, seeds in asked.items() for seed in seeds)


def _never_begun(digest: str, asked: Asked) -> CellStatus:
    states = {} if asked.error else dict.fromkeys(sorted(asked.seeds), "not started")
    return CellStatus(asked.title, None, states, {digest}, refused=asked.error)


def _begun(directory: Path, asked: Mapping[str, Asked]) -> CellStatus:
    title = shared_words([cell.title for cell in asked.values()] or [directory.name])
    status = CellStatus(title, directory, digests=set(asked))
    seeds = {seed for cell in asked.values() for seed in cell.seeds}
    on_disk = list_seeds(directory) if directory.is_dir() else []
    is_running = is_held(directory / LOCK_FILE)
    interrupted = _seeds_with_checkpoint(directory)
    errors = []
    for seed in sorted(seeds | set(on_disk)):
        path = seed_dir(directory, seed) / RESULT_FILE
        if path.is_file():
            state, error = _state_of(path)
            errors += [error] if error else []
        elif is_running and seed in on_disk:
            state = "running"
        else:
            state = "interrupted" if seed in interrupted else "not started"
        status.states[seed] = state
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
