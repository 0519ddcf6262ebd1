"""A study as its files tell: what was asked of it, and the state of every run, also while it runs.

study.jsonl holds the commands, refusals and searches, one JSON object per line; it is only ever
appended to, and no result depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from normexp.errors import UserError
from normexp.records.journal import Asked, CommandEntry, Entry, Refusal, read_entries
from normexp.records.layout import (
    CHECKPOINT_FILE,
    RESULT_FILE,
    list_cells,
    list_seeds,
    seed_dir,
)
from normexp.records.result import ENDED, Result, Status, read_result
from normexp.records.stacks import StackState, read_stacks

UNENDED = (Status.RUNNING, Status.INTERRUPTED, Status.NOT_STARTED)
STATES = (*ENDED, Status.FAILED, *UNENDED, Status.UNREADABLE)  # in the order of tables


# --- States ---------------------------------------------------------------------------------------


@dataclass
class CellState:
    """A cell: the state of each of its runs.

    Attributes:
        id: the name of its folder.
        title: norm, sizes and overrides; the cell's id if no command asked for it.
        states: by seed.
        results: of ended and failed runs, in the order of seeds.
        problems: results that cannot be read.
        refused: why it cannot be trained; empty if it can.
        stacks: that have begun with a run of it.
        was_over: before the command that asks began.
    """

    id: str
    title: str
    directory: Path = Path()
    states: dict[int, Status] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refused: str = ""
    stacks: list[StackState] = field(default_factory=list)
    was_over: bool = False

    @property
    def is_over(self) -> bool:
        """True if nothing is left to train."""
        return bool(self.refused) or not self.missing

    @property
    def status(self) -> str:
        """Of the cell for a command: finished, skipped, diverged, failed, refused or stopped."""
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
        """The errors of failed runs, each once, and of results that cannot be read."""
        errors = [run.error for run in self.results if run.error]
        return list(dict.fromkeys([*errors, *self.problems]))

    @property
    def invalid(self) -> str | None:
        """Why its numbers must not be compared."""
        return next((run.measured.invalid for run in self.results if run.measured.invalid), None)


def read_cell(
    study_dir: Path,
    cell_id: str,
    title: str,
    seeds: Iterable[int],
    stacks: Sequence[StackState],
    refused: str = "",
) -> CellState:
    """The state of these runs of a cell."""
    directory = study_dir / cell_id
    state = CellState(cell_id, title, directory, refused=refused)
    state.stacks = [one for one in stacks if any(cell == cell_id for cell, _ in one.members)]
    for seed in sorted(set(seeds)):
        run_dir = seed_dir(directory, seed)
        state.states[seed] = Status.NOT_STARTED
        if (run_dir / RESULT_FILE).exists():
            try:
                state.results.append(read_result(run_dir))
                state.states[seed] = state.results[-1].status
            except UserError as error:
                state.problems.append(str(error))
                state.states[seed] = Status.UNREADABLE
            continue
        mine = [stack for stack in state.stacks if (cell_id, seed) in stack.members]
        if any(stack.holder for stack in mine):
            state.states[seed] = Status.RUNNING
        elif any((stack.folder / CHECKPOINT_FILE).is_file() for stack in mine):
            state.states[seed] = Status.INTERRUPTED
    return state


@dataclass(frozen=True)
class Study:
    """A study, read from its files; see `read_study`.

    Attributes:
        commands: in the order of their lines.
        refusals: of cells that cannot be trained, by id; a later command has not asked for them.
        cells: those asked for by a command as it was last typed, and those on disk; by id.
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
    entries, stacks = read_entries(directory), read_stacks(directory)
    commands = [entry for entry in entries if isinstance(entry, CommandEntry)]
    on_disk = {folder.name: list_seeds(folder) for folder in list_cells(directory)}
    refusals = _refusals(entries, on_disk)
    asked = dict[str, Asked]()
    last_typed = {tuple(command.command): command for command in commands}.values()
    for command in commands:
        for cell, one in command.cells.items():
            if command in last_typed or cell in on_disk:
                before = asked[cell].seeds if cell in asked else []
                asked[cell] = Asked(one.title, [*before, *one.seeds])
    asked |= {cell: Asked(one.title, one.seeds) for cell, one in refusals.items()}
    for cell, seeds in on_disk.items():
        asked.setdefault(cell, Asked(cell, seeds))  # copied here
    cells = {
        cell: read_cell(
            *(directory, cell, one.title, one.seeds, stacks),
            refused=refusals[cell].error if cell in refusals else "",
        )
        for cell, one in asked.items()
    }
    return Study(directory, commands, refusals, cells)


def _refusals(entries: Sequence[Entry], on_disk: Iterable[str]) -> dict[str, Refusal]:
    """Those that no later command has reopened, of cells without a folder."""
    refusals: dict[str, Refusal] = {}
    for entry in entries:
        if isinstance(entry, Refusal):
            refusals[entry.cell] = entry
        else:
            refusals = {
                cell: one
                for cell, one in refusals.items()
                if cell not in entry.cells or one.command == entry.id
            }
    return {cell: one for cell, one in refusals.items() if cell not in on_disk}
