"""A study as its files tell, also while it runs: the state of every run of every cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from normexp.errors import UserError
from normexp.training.records.journal import CommandEntry, Entry, Refusal, Request, read_entries
from normexp.training.records.layout import (
    CHECKPOINT_FILE,
    RESULT_FILE,
    list_cells,
    list_seeds,
    seed_dir,
)
from normexp.training.records.result import ENDED, Result, Status, read_result_of_study
from normexp.training.records.stack_state import StackState, read_stacks

UNENDED = (Status.RUNNING, Status.INTERRUPTED, Status.NOT_STARTED)
STATES = (*ENDED, Status.FAILED, *UNENDED, Status.UNREADABLE)  # in the order of tables


@dataclass
class CellState:
    """A cell: the state of each of its runs.

    Attributes:
        id: the name of its folder.
        request: what was asked of it.
        states: the state of each seed.
        results: ended and failed runs, in the order of seeds.
        problems: why results cannot be read.
        refused: why the cell cannot be trained; empty if it can.
        stacks: the stacks that train, or have trained, a run of the cell.
        was_over: True if nothing was left to train when the command began.
    """

    id: str
    request: Request
    directory: Path = Path()
    states: dict[int, Status] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refused: str = ""
    stacks: list[StackState] = field(default_factory=list)
    was_over: bool = False

    @property
    def title(self) -> str:
        """Norm, sizes and overrides; the id if no command asked for the cell."""
        return self.request.title or self.id

    @property
    def is_over(self) -> bool:
        """True if nothing is left to train."""
        return bool(self.refused) or not self.missing

    @property
    def status(self) -> str:
        """The outcome of a command: finished, skipped, diverged, failed, refused or stopped."""
        states = set(self.states.values())
        if self.refused:
            return "refused"
        if states & {Status.FAILED, Status.UNREADABLE}:
            return "failed"
        if self.missing:
            return "stopped"
        if states == {Status.DIVERGED}:
            return "diverged"
        return "skipped" if self.was_over else "finished"

    @property
    def missing(self) -> list[int]:
        """The seeds without a result."""
        return [seed for seed, state in self.states.items() if state in UNENDED]

    @property
    def failures(self) -> list[str]:
        """The errors of failed runs, each once, and why results cannot be read."""
        errors = [run.error for run in self.results if run.error]
        return list(dict.fromkeys([*errors, *self.problems]))

    @property
    def invalid(self) -> str | None:
        """Why the numbers of the cell must not be compared; None if they may."""
        return next((run.measured.invalid for run in self.results if run.measured.invalid), None)


def read_cell(
    study_dir: Path,
    cell_id: str,
    request: Request,
    stacks: Sequence[StackState],
    refused: str = "",
) -> CellState:
    """Reads the state of the requested runs of a cell.

    Args:
        stacks: those of the study that have begun.
        refused: why the cell cannot be trained.
    """
    cell = CellState(cell_id, request, study_dir / cell_id, refused=refused)
    for stack in stacks:
        if any(member_id == cell_id for member_id, _ in stack.members):
            cell.stacks.append(stack)
    for seed in sorted(set(request.seeds)):
        run_dir = seed_dir(cell.directory, seed)
        if not (run_dir / RESULT_FILE).exists():
            run_stacks = [stack for stack in cell.stacks if (cell_id, seed) in stack.members]
            cell.states[seed] = _state_without_result(run_stacks)
            continue
        try:
            result = read_result_of_study(run_dir)
            cell.results.append(result)
            cell.states[seed] = result.status
        except UserError as error:
            cell.problems.append(str(error))
            cell.states[seed] = Status.UNREADABLE
    return cell


def _state_without_result(stacks: Sequence[StackState]) -> Status:
    """The state of a run without a result, by the stacks that it belongs to."""
    if any(stack.holder for stack in stacks):
        return Status.RUNNING
    if any((stack.folder / CHECKPOINT_FILE).is_file() for stack in stacks):
        return Status.INTERRUPTED
    return Status.NOT_STARTED


@dataclass(frozen=True)
class Study:
    """A study, read from its files; see `read_study`.

    Attributes:
        commands: in the order of their lines.
        refusals: why cells cannot be trained, by id.
        cells: those that a command asks for as it was last typed, and those on disk; by id.
    """

    directory: Path
    commands: Sequence[CommandEntry]
    refusals: dict[str, Refusal]
    cells: dict[str, CellState]

    @cached_property
    def runs(self) -> Counter[Status]:
        """The number of runs in each state, over all cells that can be trained."""
        cells = (cell for cell in self.cells.values() if not cell.refused)
        return Counter(state for cell in cells for state in cell.states.values())


def read_study(directory: Path) -> Study:
    """Reads a study, also while it runs.

    Raises:
        UserError: study.jsonl cannot be read.
    """
    entries = read_entries(directory)
    commands = [entry for entry in entries if isinstance(entry, CommandEntry)]
    on_disk = {folder.name: list_seeds(folder) for folder in list_cells(directory)}
    refusals = {
        cell_id: refusal
        for cell_id, refusal in _standing_refusals(entries).items()
        if cell_id not in on_disk
    }
    stacks, cells = read_stacks(directory), dict[str, CellState]()
    ended = {
        cell_id: [s for s in seeds if (seed_dir(directory / cell_id, s) / RESULT_FILE).exists()]
        for cell_id, seeds in on_disk.items()
    }
    for cell_id, request in _requests(commands, refusals, on_disk, ended).items():
        error = refusals[cell_id].error if cell_id in refusals else ""
        cells[cell_id] = read_cell(directory, cell_id, request, stacks, error)
    return Study(directory, commands, refusals, cells)


def _requests(
    commands: Sequence[CommandEntry],
    refusals: Mapping[str, Refusal],
    on_disk: Mapping[str, Sequence[int]],
    ended: Mapping[str, Sequence[int]],
) -> dict[str, Request]:
    """What was asked of each cell, or is on disk."""
    last_typed = {tuple(command.command): command for command in commands}
    requests: dict[str, Request] = {}
    for command in commands:
        is_last = last_typed[tuple(command.command)] is command
        for cell_id, request in command.cells.items():
            # A command that was typed again, after an edit, may have asked for other cells before.
            if is_last or cell_id in on_disk:
                earlier = requests[cell_id].seeds if cell_id in requests else []
                requests[cell_id] = replace(request, seeds=[*earlier, *request.seeds])
    for cell_id, refusal in refusals.items():
        requests[cell_id] = Request([refusal.title], refusal.seeds)
    for cell_id, seeds in on_disk.items():
        # Folders that were copied into this study, as from another machine, were asked for there.
        asked = requests.get(cell_id, Request([], [*seeds]))
        requests[cell_id] = replace(asked, seeds=[*asked.seeds, *ended[cell_id]])
    return requests


def _standing_refusals(entries: Iterable[Entry]) -> dict[str, Refusal]:
    """The last refusal of each cell, by id, unless a later command asks for the cell again."""
    refusals: dict[str, Refusal] = {}
    for entry in entries:
        if isinstance(entry, Refusal):
            refusals[entry.cell] = entry
            continue
        for cell_id in entry.cells:
            # A command refuses cells before its own line is written.
            if cell_id in refusals and refusals[cell_id].command != entry.id:
                del refusals[cell_id]
    return refusals
