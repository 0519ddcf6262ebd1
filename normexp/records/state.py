"""The state of every run of a study, read from its files, also while it runs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normexp.errors import UserError
from normexp.records.files import holder_of, is_held
from normexp.records.history import CellHistory, CommandEntry, History, read_history
from normexp.records.metrics import read_metrics
from normexp.records.paths import (
    LOCK_FILE,
    METRICS_FILE,
    RESULT_FILE,
    find_study,
    list_cells,
    list_seeds,
    seed_dir,
)
from normexp.records.result import read_result
from normexp.records.stacks import Member, list_stacks

ENDED = ("finished", "diverged")
STATES = (*ENDED, "failed", "running", "interrupted", "not started", "unreadable")

MAX_ATTEMPTS = 3  # as in conf/config.yaml, which only Hydra can read


@dataclass
class CellState:
    """One cell: the state of each of its runs.

    Attributes:
        title: norm, sizes and overrides; the cell's id if no command asked for it.
        states: by seed.
        digests: the digests of the cell in the commands that list it.
        refused: why the cell cannot be trained; empty if it can.
        attempts: how often each failed run was tried, by seed.
        notes: errors of failed runs; the training process and its progress.
    """

    title: str
    states: dict[int, str] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    refused: str = ""
    attempts: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lacking(self, max_attempts: int | None) -> set[tuple[str, int]]:
        """(digest, seed) of the runs to train, without runs that have failed too often."""
        seeds = [
            seed
            for seed, state in self.states.items()
            if state not in ENDED
            and (max_attempts is None or self.attempts.get(seed, 0) < max_attempts)
        ]
        return {(digest, seed) for digest in self.digests for seed in seeds}


@dataclass
class StudyStatus:
    """A study: its cells and its commands."""

    root: Path
    cells: list[CellState]
    commands: list[CommandEntry]

    @property
    def runs(self) -> Counter[str]:
        """The number of runs in each state, over all cells."""
        return Counter(state for cell in self.cells for state in cell.states.values())

    @property
    def is_complete(self) -> bool:
        """True if every run that can be trained has ended without failing."""
        return all(state in ENDED for state in self.runs)

    def unfinished_commands(self, *, with_exhausted: bool) -> list[CommandEntry]:
        """The commands with missing or failed runs.

        Args:
            with_exhausted: include runs that have failed as often as the command allows.
        """
        found = []
        for command in self.commands:
            limit = None if with_exhausted else max_attempts_of(command)
            lacking = set().union(*(cell.lacking(limit) for cell in self.cells))
            asked = {(digest, seed) for digest in command.cells for seed in command.cells[digest]}
            if lacking and (asked & lacking or is_search(command)):
                found.append(command)
        return found


def is_search(command: CommandEntry) -> bool:
    """True for a search: while it runs, it adds cells that its command does not list."""
    return command.command[:1] == ["normexp-tune"]


def max_attempts_of(command: CommandEntry) -> int:
    """How often a command tries a run that fails: as typed, otherwise the default."""
    typed = dict(word.split("=", 1) for word in command.command if "=" in word)
    if typed.get("retry_failed", "true").lower() == "false":
        return 1
    limit = typed.get("max_attempts", "")
    return int(limit) if limit.isdecimal() else MAX_ATTEMPTS


def read_status(runs_dir: Path, name: str) -> StudyStatus:
    """Reads the status of a study, also while it runs. Raises UserError if there is no such study.

    Commands whose sizes mean the same cell share a row. A command that was typed again, after an
    edit of a YAML or of normexp, no longer asks for the cells that it meant before.
    """
    root = find_study(runs_dir, name)
    history = read_history(root)
    by_id: dict[str, dict[str, CellHistory]] = {}
    never_begun = []
    latest = {tuple(command.command): command.cells for command in history.commands}
    replaced = {digest for command in history.commands for digest in command.cells}
    replaced -= {digest for cells in latest.values() for digest in cells}
    for digest, asked in history.cells.items():
        if asked.cell_id:
            by_id.setdefault(asked.cell_id, {})[digest] = asked
        elif digest not in replaced:
            states = {} if asked.error else dict.fromkeys(sorted(asked.seeds), "not started")
            never_begun.append(CellState(asked.title, states, {digest}, asked.error))
    for directory in list_cells(root):  # also cells that were copied here
        by_id.setdefault(directory.name, {})
    stacks = [stack for stack in list_stacks(root, by_id) if stack.checkpoint.is_file()]
    interrupted = {member for stack in stacks for member in stack.members}
    begun = [
        _status_of(root / cell_id, asked, history, interrupted) for cell_id, asked in by_id.items()
    ]
    return StudyStatus(root, [*begun, *never_begun], history.commands)


def _status_of(
    directory: Path,
    asked: Mapping[str, CellHistory],
    history: History,
    interrupted: Collection[Member],
) -> CellState:
    status = CellState(_title_of(directory.name, asked, history), digests=set(asked))
    on_disk = list_seeds(directory) if directory.is_dir() else []
    is_running = is_held(directory / LOCK_FILE)
    for seed in sorted({seed for cell in asked.values() for seed in cell.seeds} | set(on_disk)):
        run_dir = seed_dir(directory, seed)
        if (run_dir / RESULT_FILE).is_file():
            state = _read_state(run_dir, seed, status)
            # The process that holds the lock may be retrying a failed run.
            status.states[seed] = "running" if state == "failed" and is_running else state
        elif is_running and seed in on_disk:
            status.states[seed] = "running"
        else:
            is_cut = (directory.name, seed) in interrupted
            status.states[seed] = "interrupted" if is_cut else "not started"
    if is_running:
        status.notes.append(_progress(directory, on_disk))
    return status


def _title_of(cell_id: str, asked: Mapping[str, CellHistory], history: History) -> str:
    if asked:
        return shared_words([cell.title for cell in asked.values()])
    for cell in history.cells.values():
        if cell_id in cell.earlier_ids:
            return f"{cell.title}, before its source changed"
    return cell_id


def _read_state(run_dir: Path, seed: int, status: CellState) -> str:
    """The state of an ended run; adds its error and attempts to `status`."""
    try:
        result = read_result(run_dir)
    except UserError as error:
        state, reason = "unreadable", str(error)
    else:
        state, reason = result.status, result.error
        if state == "failed":
            status.attempts[seed] = result.attempts
    if reason and reason not in status.notes:
        status.notes.append(reason)
    return state


def _progress(directory: Path, seeds: list[int]) -> str:
    """Describes the process that trains a cell, and the step of its last checkpoint."""
    process = f"process {holder_of(directory / LOCK_FILE)}"
    steps = []
    for seed in seeds:
        run_dir = seed_dir(directory, seed)
        if (run_dir / METRICS_FILE).is_file() and not (run_dir / RESULT_FILE).is_file():
            with contextlib.suppress(UserError):  # the process that trains will report it
                steps += [row.step for row in read_metrics(run_dir / METRICS_FILE)[-1:]]
    return f"{process}, step {max(steps)} at its last checkpoint" if steps else process


def shared_words(titles: Sequence[str]) -> str:
    """The words that all titles of one cell share, such as `norm=none` for several sizes."""
    first, *others = [title.split() for title in titles]
    return " ".join(word for word in first if all(word in other for other in others)) or titles[0]
