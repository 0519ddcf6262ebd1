"""A study as its files tell: what was asked of it, and the state of every run, also while it runs.

study.jsonl holds the commands, refusals and searches, one JSON object per line; it is only ever
appended to, and no result depends on it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path

from normexp.errors import UserError
from normexp.records.files import (
    appending,
    holder_of,
    read_json,
    read_lines,
    user_error_if_denied,
    write_json,
)
from normexp.records.paths import (
    ATTEMPTS_FILE,
    CHECKPOINT_FILE,
    LOCK_FILE,
    PROGRESS_FILE,
    RESULT_FILE,
    STACKS,
    STUDY_FILE,
    list_cells,
    list_seeds,
    seed_dir,
    subfolders,
)
from normexp.records.result import ENDED, Result, Status, read_result

Member = tuple[str, int]  # the id of a cell, and a seed
# The states of runs, in the order of tables.
STATES = (
    *(*ENDED, Status.FAILED, Status.RUNNING, Status.INTERRUPTED, Status.NOT_STARTED),
    Status.UNREADABLE,
)


UNENDED = (Status.RUNNING, Status.INTERRUPTED, Status.NOT_STARTED)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- study.jsonl ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What a command asks of a cell."""

    title: str
    seeds: list[int]


@dataclass(frozen=True)
class CommandEntry:
    """A command that trained something, or tried to.

    Attributes:
        command: the words that were typed, program first.
        cells: by id.
    """

    id: str
    command: list[str]
    code_version: str
    cells: dict[str, Asked]
    time: str = field(default_factory=_now)

    @property
    def is_search(self) -> bool:
        """True for a search, which adds cells that its line does not list."""
        return self.command[:1] == ["normexp-tune"]

    def seeds_of(self, cell: str) -> set[int]:
        """The seeds that the command asks of a cell."""
        return set(self.cells[cell].seeds) if cell in self.cells else set()


@dataclass(frozen=True)
class Refusal:
    """A cell that cannot be trained; a later command tries again.

    Attributes:
        command: id of the command.
    """

    cell: str
    title: str
    seeds: list[int]
    command: str
    error: str
    time: str = field(default_factory=_now)


@dataclass(frozen=True)
class SearchEntry:
    """The cells that a search has tried, for its tuning curve.

    Attributes:
        words: the overrides that all points share, as typed.
        keys: the keys that were searched.
        metric: the name of the validation metric that points are compared by.
        points: the ids of the cells.
    """

    title: str
    words: list[str]
    keys: list[str]
    metric: str
    points: list[str]

    @property
    def norm(self) -> str:
        """The norm that it is for; empty if no word names one."""
        words = (word.lstrip("+").partition("norm=") for word in self.words)
        return next((name for before, _, name in words if name and not before), "")


Entry = CommandEntry | Refusal | SearchEntry
_KINDS = {"command": CommandEntry, "refusal": Refusal, "search": SearchEntry}


def append_entry(study_dir: Path, entry: Entry) -> None:
    """Appends a line, and makes the study; a command that is there already is not added again.

    Raises:
        UserError: the file cannot be written.
    """
    kind = next(name for name, known in _KINDS.items() if isinstance(entry, known))
    line = json.dumps({"line": kind} | asdict(entry), allow_nan=False)
    path = study_dir / STUDY_FILE
    with user_error_if_denied(study_dir, "take another study=..."):
        while True:
            study_dir.mkdir(parents=True, exist_ok=True)
            try:
                with appending(path) as lines:
                    known = read_entries(study_dir)
                    is_new = all(getattr(e, "id", "") != getattr(entry, "id", None) for e in known)
                    lines += [line] * is_new
                return
            except FileNotFoundError:  # another process has just removed the empty folder
                continue


def read_entries(study_dir: Path) -> tuple[Entry, ...]:
    """The lines of study.jsonl; none without the file.

    Raises:
        UserError: the file cannot be read, or a line of it was edited by hand.
    """
    path = study_dir / STUDY_FILE
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ()
    return _entries(path, stat.st_ino, stat.st_size)


@lru_cache(maxsize=8)  # a study is read every second while it is trained
def _entries(path: Path, _inode: int, _size: int) -> tuple[Entry, ...]:
    with user_error_if_denied(path, "make it readable (results do not depend on it)"):
        lines = read_lines(path)
    entries: list[Entry] = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            kind = _KINDS[content.pop("line")]
            if kind is CommandEntry:
                content["cells"] = {key: Asked(**asked) for key, asked in content["cells"].items()}
            entries.append(kind(**content))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} line {number} was not written by normexp; correct the line, or move the "
                "file away (results do not depend on it)"
            ) from error
    return tuple(entries)


def refused_by(study_dir: Path, command: str) -> dict[str, str]:
    """Why a command refused cells, by their ids."""
    refusals = (entry for entry in read_entries(study_dir) if isinstance(entry, Refusal))
    return {entry.cell: entry.error for entry in refusals if entry.command == command}


def remove_refused(study_dir: Path, command: str) -> None:
    """Removes a study that holds nothing but refusals of one command, its author's mistakes."""
    path = study_dir / STUDY_FILE
    if not path.exists():
        return
    with appending(path):  # so that nobody else writes
        known = [path, *(folder for folder in subfolders(study_dir) if not any(folder.iterdir()))]
        entries = read_entries(study_dir)
        if set(study_dir.iterdir()) == set(known) and all(
            isinstance(entry, Refusal) and entry.command == command for entry in entries
        ):
            path.unlink()
            for folder in [*known[1:], study_dir]:
                folder.rmdir()


# --- Stacks ---------------------------------------------------------------------------------------


@dataclass
class Attempts:
    """attempts.json of a stack, written before it trains.

    Attributes:
        members: the runs that are trained.
        threads: CPU threads of its first training, on which its last digits depend.
        count: trainings that have begun since the last checkpoint, and that nobody interrupted.
        checkpointed_at: when the last of them began; 0 without a checkpoint.
        parts: what is trained by itself instead: "cells" or "runs"; empty for the whole stack.
        why: the failure of the whole stack, if that is the reason.
    """

    members: list[Member] = field(default_factory=list)
    threads: int = 0
    count: int = 0
    checkpointed_at: int = 0
    parts: str = ""
    why: str = ""


def read_attempts(folder: Path) -> Attempts:
    """Those of a stack; without the file, none."""
    path = folder / ATTEMPTS_FILE
    if not path.exists():
        return Attempts()
    content = read_json(path)
    try:
        content["members"] = [(str(cell), int(seed)) for cell, seed in content["members"]]
        return Attempts(**content)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} was not written by normexp; remove the folder") from error


def write_attempts(folder: Path, attempts: Attempts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ATTEMPTS_FILE, asdict(attempts))


@dataclass(frozen=True)
class StackState:
    """A stack that has begun: the runs that it trains, and the steps done of how many."""

    folder: Path
    members: Sequence[Member]
    step: int = 0
    total: int = 0

    @property
    def has_checkpoint(self) -> bool:
        return (self.folder / CHECKPOINT_FILE).is_file()


def read_stacks(study_dir: Path) -> list[StackState]:
    """The stacks that have begun, except those whose parts are trained instead."""
    states = []
    for folder in subfolders(study_dir / STACKS):
        try:
            attempts = read_attempts(folder)
            path = folder / PROGRESS_FILE
            progress = read_json(path) if path.exists() else {}
        except UserError:  # removed meanwhile; else the process that trains it says so
            continue
        if attempts.members and not attempts.parts:
            states.append(StackState(folder, attempts.members, **progress))
    return states


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
        process: that trains it now.
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
    process: int | None = None
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
        return next((run.invalid for run in self.results if run.invalid), None)


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
    state.process = holder_of(directory / LOCK_FILE)
    state.stacks = [one for one in stacks if any(cell == cell_id for cell, _ in one.members)]
    for seed in sorted(set(seeds)):
        run_dir, mine = seed_dir(directory, seed), (cell_id, seed)
        stack = next((one for one in state.stacks if mine in one.members), None)
        if (run_dir / RESULT_FILE).exists():
            try:
                state.results.append(read_result(run_dir))
                state.states[seed] = state.results[-1].status
            except UserError as error:
                state.problems.append(str(error))
                state.states[seed] = Status.UNREADABLE
        elif stack is not None and state.process is not None:
            state.states[seed] = Status.RUNNING
        elif stack is not None and stack.has_checkpoint:
            state.states[seed] = Status.INTERRUPTED
        else:
            state.states[seed] = Status.NOT_STARTED
    return state


@dataclass(frozen=True)
class Study:
    """A study, read from its files; see `read_study`.

    Attributes:
        commands: in the order of their lines.
        searches: the latest of each space.
        refusals: of cells that cannot be trained, by id; a later command has not asked for them.
        cells: those asked for by a command as it was last typed, and those on disk; by id.
    """

    directory: Path
    commands: Sequence[CommandEntry]
    searches: Sequence[SearchEntry]
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
    searches = {
        json.dumps([entry.words, entry.keys]): entry
        for entry in entries
        if isinstance(entry, SearchEntry)
    }
    on_disk = {folder.name for folder in list_cells(directory)}
    refusals = _refusals(entries, on_disk)
    titles, seeds = dict[str, str](), dict[str, set[int]]()
    asking = {tuple(command.command): command for command in commands}.values()
    for command in [*asking, *(one for one in commands if one not in asking)]:
        for cell, asked in command.cells.items():
            if command in asking or cell in on_disk:
                titles.setdefault(cell, asked.title)
                seeds.setdefault(cell, set()).update(asked.seeds)
    for cell, refusal in refusals.items():
        titles[cell] = refusal.title
        seeds.setdefault(cell, set()).update(refusal.seeds)
    for cell in sorted(on_disk):
        titles.setdefault(cell, cell)  # copied here
        seeds.setdefault(cell, set()).update(list_seeds(directory / cell))
    stacks = read_stacks(directory)
    cells = {
        cell: read_cell(
            directory,
            cell,
            title,
            seeds[cell],
            stacks,
            refusals[cell].error if cell in refusals else "",
        )
        for cell, title in titles.items()
    }
    return Study(directory, commands, list(searches.values()), refusals, cells)


def _refusals(entries: Sequence[Entry], on_disk: set[str]) -> dict[str, Refusal]:
    """Those that no later command has reopened, of cells without a folder."""
    refusals: dict[str, Refusal] = {}
    for entry in entries:
        if isinstance(entry, Refusal) and entry.cell not in on_disk:
            refusals[entry.cell] = entry
        elif isinstance(entry, CommandEntry):
            for cell in entry.cells:
                if cell in refusals and refusals[cell].command != entry.id:
                    del refusals[cell]
    return refusals
