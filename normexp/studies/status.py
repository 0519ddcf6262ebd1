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
    INDEX_FILE,
    LOCK_FILE,
    METRICS_FILE,
    RESULT_FILE,
    Study,
    checkpointed_stacks,
    list_seeds,
    seed_dir,
)
from normexp.records.lock import StackLock, is_held
from normexp.records.metrics import read_metrics
from normexp.records.reader import find_study, read_run
from normexp.records.shared import interrupted_stacks
from normexp.records.study_file import read_commands
from normexp.records.writer import refusing_denied
from normexp.studies.titles import shared_words

STATES = ("finished", "diverged", "failed", "running", "interrupted", "not started", "unreadable")

MAX_ATTEMPTS = 3  # as in conf/config.yaml, which takes Hydra to read


@dataclass
class CellStatus:
    """One cell: how many of its runs are in which state, and what there is to say of it.

    Attributes:
        title: what it is, else its id.
        directory: None where it was never begun.
        states: of its runs, by seed.
        digests: what it is called by the commands that asked for it.
        refused: why it cannot be trained; empty where it can.
        attempts: how often each failed run was tried, by seed.
        notes: errors of failed runs, the process that trains, how far.
    """

    title: str
    directory: Path | None
    states: dict[int, str] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    refused: str = ""
    attempts: dict[int, int] = field(default_factory=dict)
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

    @property
    def most_attempts(self) -> int:
        """Of the failed runs, how often the one was tried that was tried most; 0 without any."""
        return max((most for cell in self.cells for most in cell.attempts.values()), default=0)

    def unfinished_commands(self, *, with_spent: bool = True) -> list[dict[str, Any]]:
        """Those that asked for a run that has not ended well, and that would train it.

        With those of which that is not known: of older records, and searches, which ask as they go.

        Args:
            with_spent: count failed runs that were tried as often as the command allows.
        """
        found = []
        for command in self.commands:
            limit = None if with_spent else max_attempts_of(command)
            lacking = {
                (digest, seed)
                for cell in self.cells
                for digest in cell.digests
                for seed, state in cell.states.items()
                if state in STATES[2:] and not _is_spent(cell, seed, limit)
            }
            if _asks_for(command, lacking):
                found.append(command)
        return found


def read_status(runs_dir: Path, name: str) -> StudyStatus:
    """The status of a study, also while it runs. Raises UserError where there is none."""
    root = find_study(runs_dir, name)
    by_id: dict[str, dict[str, Asked]] = {}  # sizes that came to one cell are one row
    never_begun = []
    with refusing_denied(root / INDEX_FILE, "make it readable"):
        index = read_index(root)
    for digest, cell in index.items():
        if cell.cell_id:
            by_id.setdefault(cell.cell_id, {})[digest] = cell
        else:
            never_begun.append(_never_begun(digest, cell))
    for directory in Study(root).list_cells():  # of before the index, or copied here
        by_id.setdefault(directory.name, {})
    cells = [_begun(root / cell_id, asked) for cell_id, asked in by_id.items()]
    earlier = {old: cell.title for cell in index.values() for old in cell.earlier_ids}
    for cell in cells:
        if cell.title in earlier:  # its bare id
            cell.title = f"{earlier[cell.title]}, before its source changed"
    return StudyStatus(name, root, [*cells, *never_begun], read_commands(root))


def max_attempts_of(command: Mapping[str, Any]) -> int:
    """How often a command tries a run that fails: what was typed, else the config's defaults."""
    typed = dict(word.split("=", 1) for word in command.get("command", []) if "=" in word)
    if typed.get("retry_failed", "true").lower() == "false":
        return 1
    limit = typed.get("max_attempts", "")
    return int(limit) if limit.isdecimal() else MAX_ATTEMPTS


def _is_spent(cell: CellStatus, seed: int, limit: int | None) -> bool:
    return limit is not None and cell.attempts.get(seed, 0) >= limit


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
            state, error, attempts = _state_of(path.parent)
            errors += [error] if error else []
            if state == "failed" and is_running:  # it may be tried again just now
                state = "running"
            elif state == "failed":
                status.attempts[seed] = attempts
        elif is_running and seed in on_disk:
            state = "running"
        else:
            state = "interrupted" if seed in interrupted else "not started"
        status.states[seed] = state
    status.notes += list(dict.fromkeys(errors))
    if is_running:
        status.notes.append(_how_far(directory, on_disk))
    return status


def _state_of(run_dir: Path) -> tuple[str, str | None, int]:
    """The state of an ended run, its error, and how often it was tried."""
    try:
        result = read_run(run_dir)
    except UserError as error:
        return "unreadable", str(error), 1
    return result.status, result.error, result.attempts or 1


def _seeds_with_checkpoint(directory: Path) -> set[int]:
    seeds: set[int] = set()
    for stack in checkpointed_stacks(directory).values():
        seeds.update(stack)
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
