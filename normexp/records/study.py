"""A study as its files tell: what was asked of it, and the state of every run, also while it runs.

study.jsonl holds the commands, refusals and searches, one JSON object per line; it is only ever
appended to, and no result depends on it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path

from normexp.errors import UserError
from normexp.records.files import file_lock, holder_of, read_json, write_json, write_text
from normexp.records.layout import (
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
UNENDED = (Status.RUNNING, Status.INTERRUPTED, Status.NOT_STARTED)
STATES = (*ENDED, Status.FAILED, *UNENDED, Status.UNREADABLE)  # in the order of tables


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
        cells: by id; a search adds cells that its line does not list.
        searched: the keys whose values it searches.
    """

    id: str
    command: list[str]
    code_version: str
    cells: dict[str, Asked]
    searched: list[str] = field(default_factory=list)
    time: str = field(default_factory=_now)

    @property
    def key(self) -> tuple[str, ...]:
        """Lines with one key say the same."""
        return (self.id,)

    @property
    def num_runs(self) -> int:
        return sum(len(one.seeds) for one in self.cells.values())


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

    @property
    def key(self) -> tuple[str, ...]:
        return (self.command, self.cell)


Entry = CommandEntry | Refusal


def append_entry(study_dir: Path, entry: Entry) -> None:
    """Appends a line, and makes the study; what a line says already is not added again."""
    study_dir.mkdir(parents=True, exist_ok=True)
    with file_lock(study_dir / LOCK_FILE, waits=True):
        if entry.key in {one.key for one in read_entries(study_dir)}:
            return
        path = study_dir / STUDY_FILE
        before = path.read_text() if path.exists() else ""
        write_text(path, before + entry_line(entry) + "\n")


def entry_line(entry: Entry) -> str:
    """A line of study.jsonl."""
    kind = "command" if isinstance(entry, CommandEntry) else "refusal"
    return json.dumps({"line": kind} | asdict(entry))


def read_entries(study_dir: Path) -> tuple[Entry, ...]:
    """The lines of study.jsonl; none without the file.

    Raises:
        UserError: a line was edited by hand.
    """
    path = study_dir / STUDY_FILE
    if not path.exists():
        return ()
    stat = path.stat()
    return _entries(path, stat.st_ino, stat.st_size)


@lru_cache(maxsize=8)  # a study is read every second while it is trained
def _entries(path: Path, _inode: int, _size: int) -> tuple[Entry, ...]:
    return parse_entries(path.read_text(), path)


def parse_entries(text: str, path: Path) -> tuple[Entry, ...]:
    """The lines of the text of a study.jsonl. Raises UserError, naming the file."""
    entries: list[Entry] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            content = json.loads(line)
            if content.pop("line") == "refusal":
                entries.append(Refusal(**content))
                continue
            content["cells"] = {key: Asked(**asked) for key, asked in content["cells"].items()}
            entries.append(CommandEntry(**content))
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
    if not study_dir.is_dir():
        return
    with suppress(OSError):
        (study_dir / STACKS).rmdir()
    with file_lock(study_dir / LOCK_FILE, waits=True):
        is_empty = {path.name for path in study_dir.iterdir()} <= {STUDY_FILE, LOCK_FILE}
        entries = read_entries(study_dir)
        if is_empty and len(refused_by(study_dir, command)) == len(entries):
            (study_dir / STUDY_FILE).unlink(missing_ok=True)
    if not any(study_dir.iterdir()):
        study_dir.rmdir()


# --- Stacks ---------------------------------------------------------------------------------------


def lock_of(cell_dir: Path, seed: int) -> Path:
    """The lock of a run; beside its folder, which is there only once it trains."""
    return cell_dir / f"{LOCK_FILE}-{seed}"


@dataclass
class Attempts:
    """attempts.json of a stack, written before it trains.

    Attributes:
        members: the runs that are trained.
        threads: of its first training, if it is large: its last digits depend on them.
        count: trainings that have begun since the last checkpoint, and that nobody interrupted.
        checkpointed_at: when the last of them began; 0 without a checkpoint.
        is_apart: each run is a stack of its own instead.
        why: the failure of the whole stack; empty if its runs would only have trained in turn.
    """

    members: list[Member] = field(default_factory=list)
    threads: int = 0
    count: int = 0
    checkpointed_at: int = 0
    is_apart: bool = False
    why: str = ""


def read_attempts(folder: Path) -> Attempts:
    """Those of a stack; without the file, none."""
    attempts = Attempts(**read_json(folder / ATTEMPTS_FILE, missing={}))
    attempts.members = [(cell, seed) for cell, seed in attempts.members]
    return attempts


def write_attempts(folder: Path, attempts: Attempts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ATTEMPTS_FILE, asdict(attempts))


@dataclass(frozen=True)
class StackState:
    """A stack that has begun: the runs that it trains, and the steps done of how many.

    Attributes:
        metrics: the last training loss and validation metric, as means over its runs.
        holder: the process that trains it now, with its command; empty if none does.
    """

    folder: Path
    members: Sequence[Member]
    holder: str = ""
    step: int = 0
    total: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_stacks(study_dir: Path) -> list[StackState]:
    """The stacks that have begun, except those whose runs are trained by themselves."""
    states = []
    for folder in subfolders(study_dir / STACKS):
        try:
            attempts = read_attempts(folder)
            progress = read_json(folder / PROGRESS_FILE, missing={})
        except UserError:  # the process that trains it says so
            continue
        if not attempts.is_apart:
            locks = [lock_of(study_dir / cell, seed) for cell, seed in attempts.members]
            holders = [holder_of(lock) for lock in locks]
            holder = holders[0] if holders and all(holders) else ""
            states.append(StackState(folder, attempts.members, holder, **progress))
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
