"""The state of every run of a study, read from its files, also while it runs."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from normexp.errors import UserError
from normexp.records.files import holder_of, is_held
from normexp.records.history import (
    CommandEntry,
    EndEntry,
    ForgetEntry,
    History,
    append_entries,
    read_history,
)
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
from normexp.records.result import ENDED, Status, read_result
from normexp.records.stacks import Member, StackRecord, list_stacks

REFUSED = "REFUSED"  # stands for all refused cells, see `forget_cells`
# The states of runs, in the order of the table.
STATES = (
    *(*ENDED, Status.FAILED, Status.RUNNING, Status.INTERRUPTED, Status.NOT_STARTED),
    Status.UNREADABLE,
)


@dataclass
class CellState:
    """One cell: the state of each of its runs.

    Attributes:
        id: the name of its folder.
        title: norm, sizes and overrides; the cell's id if no command asked for it.
        is_asked: a command, as it was last typed, asks for it.
        states: by seed.
        refused: why the cell cannot be trained; empty if it can.
        attempts: how often each failed run was tried, by seed.
        notes: errors of failed runs; the training process and its progress.
    """

    id: str
    title: str
    is_asked: bool
    states: dict[int, Status] = field(default_factory=dict)
    refused: str = ""
    attempts: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lacking(self, max_attempts: int | None) -> set[Member]:
        """The runs to train, without those that have failed too often."""
        return {
            (self.id, seed)
            for seed, state in self.states.items()
            if state not in ENDED
            and (max_attempts is None or self.attempts.get(seed, 0) < max_attempts)
        }


@dataclass
class StudyStatus:
    """A study: its cells, its commands, and the folders of runs that no longer count."""

    root: Path
    cells: list[CellState]
    history: History
    ignored: Sequence[Path] = ()

    @property
    def runs(self) -> Counter[Status]:
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
        unfinished = []
        for command in self.history.commands:
            limit = None if with_exhausted else command.max_attempts
            lacking = set().union(*(cell.lacking(limit) for cell in self.cells))
            asked = {(cell, seed) for cell in command.cells for seed in command.seeds_of(cell)}
            if lacking and (asked & lacking or is_search(command)):
                unfinished.append(command)
        return unfinished


def is_search(command: CommandEntry) -> bool:
    """True for a search: while it runs, it adds cells that its command does not list."""
    return command.command[:1] == ["normexp-tune"]


def read_status(runs_dir: Path, name: str) -> StudyStatus:
    """Reads the status of a study, also while it runs. Raises UserError if there is no such study.

    After an edit of a YAML or of a norm, the same words ask for other cells; those that only an
    earlier such command named are not asked for.
    """
    root = find_study(runs_dir, name)
    history = read_history(root)
    asked = _asked_cells(history)
    states: dict[str, CellState] = {}
    titles: dict[str, list[str]] = {}
    seeds: dict[str, set[int]] = {}
    for cell, title, wanted in _requests(history):
        titles.setdefault(cell, []).append(title)
        seeds.setdefault(cell, set()).update(wanted)
        state = states.setdefault(cell, CellState(cell, cell, is_asked=False))
        state.is_asked |= cell in asked
        if (end := history.errors.get(cell)) is not None:
            state.refused = f"{end.status}: {end.error}"
    for key, state in states.items():
        state.title = shared_words(titles[key]) or titles[key][0]
    ignored, all_asked = ignored_runs(root, history), history.asked_seeds(history.typed)
    on_disk = [  # also cells that were copied here
        directory.name
        for directory in list_cells(root)
        if directory.name in states or directory.name not in all_asked
    ]
    for cell_id in on_disk:
        states.setdefault(cell_id, CellState(cell_id, cell_id, is_asked=False))
    stacks = [stack for stack in list_stacks(root, states) if stack.checkpoint.is_file()]
    interrupted = {member: stack for stack in stacks for member in stack.members}
    for key, state in states.items():
        if key in on_disk:
            state.refused = ""
            if not state.is_asked and key in titles:
                state.title += ", before its source changed"
        if not state.refused:
            _read_runs(root / key, state, seeds.get(key, set()), interrupted, ignored)
    shown = [state for key, state in states.items() if state.is_asked or key in on_disk]
    return StudyStatus(root, shown, history, ignored)


def _asked_cells(history: History) -> set[str]:
    """The cells that a command asks for as it was last typed, or was refused before it began."""
    latest = {tuple(command.command): command for command in history.commands}
    asked = {cell for command in latest.values() for cell in command.cells}
    named = {cell for command in history.commands for cell in command.cells}
    return asked | (history.errors.keys() - named)


def refused_cells(root: Path, history: History) -> list[EndEntry]:
    """Why each cell that a study asks for, and that has no folder, cannot be trained."""
    on_disk = {directory.name for directory in list_cells(root)}
    asked = _asked_cells(history)
    return [end for cell, end in history.errors.items() if cell in asked and cell not in on_disk]


def _requests(history: History) -> Iterator[tuple[str, str, Sequence[int]]]:
    """The cells, titles and seeds of all commands, and of refusals before a command began."""
    for command in history.commands:
        for cell, points in command.cells.items():
            for title, seeds in points:
                yield cell, title, seeds
    for end in history.ends:
        if end.seeds:
            yield end.cell, end.title, end.seeds


def commands_by_number(history: History) -> dict[int, list[CommandEntry]]:
    """The commands of a study by the number that status prints.

    A command typed again keeps its number, unless an edit of a source made it ask for other cells.
    """
    numbers: dict[str, int] = {}
    commands: dict[int, list[CommandEntry]] = {}
    for position, command in enumerate(history.typed, start=1):
        asked = {cell: command.seeds_of(cell) for cell in command.cells}
        content = [command.id in history.forgotten, command.command, asked]
        key = json.dumps(content, sort_keys=True, default=sorted)
        commands.setdefault(numbers.setdefault(key, position), []).append(command)
    return commands


def ignored_runs(root: Path, history: History) -> list[Path]:
    """The folders of runs that only forgotten commands asked for. No report counts them."""
    asked = history.asked_seeds(history.commands)
    forgotten = [command for command in history.typed if command.id in history.forgotten]
    runs = [
        seed_dir(root / cell, seed)
        for cell, seeds in history.asked_seeds(forgotten).items()
        for seed in sorted(seeds - asked.get(cell, set()))
    ]
    return [run for run in runs if run.is_dir()]


def forget(runs_dir: Path, name: str, wanted: Sequence[str]) -> list[str]:
    """Drops commands, and cells without a folder, from a study; returns their words and titles.

    Args:
        wanted: numbers of commands or words of titles, as status prints them; ids of cells; REFUSED
            for all cells that cannot be trained.

    Raises:
        UserError: nothing has this number, title or id; a cell with a folder, or one in training.
    """
    status = read_status(runs_dir, name)
    commands: dict[str, list[str]] = {}
    cells: dict[str, CellState] = {}
    lines: list[str] = []
    for word in wanted:
        if word.isdigit():
            for command in _commands_to_forget(status, int(word)):
                ended = [cell for cell in command.cells if _has_results(status.root / cell)]
                commands[command.id] = ended
            lines.append(f"command {word}")
        else:
            cells |= {cell.id: cell for cell in _cells_to_forget(status, word)}
    named = {cell for cell, _, _ in _requests(status.history)}
    forgotten = [cell for cell in named if cell in cells]
    if forgotten or commands:
        append_entries(status.root, [ForgetEntry(sorted(forgotten), commands)])
    return [*lines, *(cell.title for cell in cells.values())]


def _commands_to_forget(status: StudyStatus, number: int) -> list[CommandEntry]:
    """The command of a number, each time that it was typed."""
    forgotten = status.history.forgotten
    known = {
        number: commands
        for number, commands in commands_by_number(status.history).items()
        if commands[0].id not in forgotten
    }
    if number not in known:
        raise UserError(
            f"forget={number}: no such command, or it was forgotten before; the study has "
            f"{', '.join(map(str, known)) or 'none'}"
        )
    named = {cell for command in known[number] for cell in command.cells}
    for cell in sorted(named):
        if is_held(lock := status.root / cell / LOCK_FILE):
            raise UserError(
                f"forget={number}: process {holder_of(lock)} trains {cell}; stop that command first"
            )
    return known[number]


def _cells_to_forget(status: StudyStatus, word: str) -> list[CellState]:
    known = {cell.id: cell for cell in status.cells}
    if word == REFUSED:
        chosen = [cell for cell in status.cells if cell.refused]
        if not chosen:
            raise UserError(f"forget={word}: no cell of study={status.root.name} was refused")
    elif word in known:
        chosen = [known[word]]
    else:
        chosen = [cell for cell in status.cells if {*word.split()} <= {*cell.title.split()}]
        if not chosen:
            like = [key for key in known if word in key]
            near = like or difflib.get_close_matches(word, known, n=3, cutoff=0.4)
            raise UserError(
                f"forget={word}: no such cell; give words of its title, as normexp.status prints "
                f"it, or an id, such as {', '.join((near or [*known])[:3])}"
            )
    for cell in chosen:
        if (status.root / cell.id).is_dir():
            raise UserError(
                f"forget={word}: {status.root / cell.id} holds what was trained; remove that "
                "folder first if nobody needs it, or forget the command that asked for it, by its "
                "number"
            )
    return chosen


def _has_results(directory: Path) -> bool:
    return any(
        (seed_dir(directory, seed) / RESULT_FILE).is_file() for seed in list_seeds(directory)
    )


def _read_runs(
    directory: Path,
    state: CellState,
    asked: Collection[int],
    interrupted: Mapping[Member, StackRecord],
    ignored: Collection[Path],
) -> None:
    """Adds the state of each run of a cell."""
    on_disk = [seed for seed in list_seeds(directory) if seed_dir(directory, seed) not in ignored]
    is_running = is_held(directory / LOCK_FILE)
    for seed in sorted({*asked, *on_disk}):
        run_dir = seed_dir(directory, seed)
        if (run_dir / RESULT_FILE).exists():
            ended = _read_state(run_dir, seed, state)
            # The process that holds the lock may be retrying a failed run.
            retries = ended is Status.FAILED and is_running
            state.states[seed] = Status.RUNNING if retries else ended
        elif is_running and seed in on_disk:
            state.states[seed] = Status.RUNNING
        else:
            stack = interrupted.get((directory.name, seed))
            state.states[seed] = Status.NOT_STARTED if stack is None else Status.INTERRUPTED
            words = "" if stack is None else stack.resumes_at
            if words and words not in state.notes:
                state.notes.append(words)
    if is_running:
        state.notes.append(_progress(directory, on_disk))


def _read_state(run_dir: Path, seed: int, cell: CellState) -> Status:
    """The state of an ended run; adds its error and attempts to those of its cell."""
    try:
        result = read_result(run_dir)
    except UserError as error:
        state, reason = Status.UNREADABLE, str(error)
    else:
        state, reason = result.status, result.error
        if state is Status.FAILED:
            cell.attempts[seed] = result.attempts
    if reason and reason not in cell.notes:
        cell.notes.append(reason)
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
    return " ".join(word for word in first if all(word in other for other in others))
