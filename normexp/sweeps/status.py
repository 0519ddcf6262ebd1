"""What a study has, lacks and failed, read from its files alone: at once, and without torch."""

from __future__ import annotations

import contextlib
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.config.spec import Outcome
from normexp.errors import UserError
from normexp.records.files import StackLock, is_held, refusing_denied
from normexp.records.history import Asked, read_commands, read_index
from normexp.records.metrics import read_metrics
from normexp.records.paths import (
    INDEX_FILE,
    LOCK_FILE,
    METRICS_FILE,
    RESULT_FILE,
    Study,
    checkpointed_stacks,
    list_seeds,
    seed_dir,
)
from normexp.records.result import Result, find_study, interrupted_stacks, read_result, read_run
from normexp.sweeps.display import shared_words, tell_apart

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


ENTRIES = {"normexp-train": "python -m normexp.train", "normexp-tune": "python -m normexp.tune"}


def print_status(status: StudyStatus) -> None:
    """One row per cell, then the commands so far, and the next one."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(_table(status))
    runs = status.runs
    counts = ", ".join(f"{runs[state]} {state}" for state in STATES if runs[state])
    refused = sum(bool(cell.refused) for cell in status.cells)
    more = f"; {refused} cells refused" if refused else ""
    lines = [
        f"{status.root}: {sum(runs.values())} runs of {len(status.cells)} cells: {counts}{more}"
    ]
    lines += ["commands so far:"] if status.commands else []
    lines += [f"  {command.get('time', '?')}  {_spoken(command)}" for command in status.commands]
    lines += _next(status)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(status: StudyStatus) -> Table:
    states = [state for state in STATES if status.runs[state]]
    shared, titles = _titles(status.cells)
    caption = Text(shared) if shared else None  # Text, as [...] in a title is no markup
    table = Table("cell", *states, "", box=None, caption=caption, caption_justify="left")
    for cell, title in zip(status.cells, titles, strict=True):
        counts = [str(cell.runs[state] or "-") for state in states]
        table.add_row(*map(Text, [title, *counts, _note(cell)]))
    return table


def _titles(cells: Sequence[CellStatus]) -> tuple[str, list[str]]:
    """What all cells share, and what each is beyond that."""
    named = [cell.title for cell in cells if cell.digests and not cell.refused]
    shared, apart = tell_apart(named)
    own = dict(zip(named, apart, strict=True))
    return f"all with {shared}" if shared else "", [
        own.get(cell.title, cell.title) for cell in cells
    ]


def _note(cell: CellStatus) -> str:
    return "; ".join([cell.refused] * bool(cell.refused) + cell.notes)


def _spoken(command: Mapping[str, Any]) -> str:
    typed: list[str] = list(command.get("command") or ["?"])
    entry, words = typed[0], typed[1:]
    return " ".join([ENTRIES.get(entry, entry), shlex.join(words)])


def _again(status: StudyStatus, command: Mapping[str, Any], *, tries: int | None = None) -> str:
    """A recorded line for where the study lies by now: it may have been moved or renamed.

    Args:
        tries: how often a run may fail, in the place of what was typed.
    """
    typed: list[str] = list(command.get("command") or ["?"])
    dropped = "study|runs_dir" if tries is None else "study|runs_dir|max_attempts|retry_failed"
    words = [word for word in typed if not re.match(rf"\+*({dropped})=", word)]
    name = status.name
    if typed[0] == "normexp-tune" and not any(re.match(r"study=.*-search$", w) for w in typed):
        name = name.removesuffix("-search")  # the study of the trials is called after the report's
    if name != "default" or any(word.startswith("experiment=") for word in typed):
        words.append(f"study={name}")
    if status.root.parent != Path("runs"):
        words.append(f"runs_dir={status.root.parent}")
    words += [] if tries is None else [f"max_attempts={tries}"]
    return _spoken({"command": words})


def _next(status: StudyStatus) -> list[str]:
    """What finishes the study, or what to do with a finished one."""
    place = "" if status.root.parent == Path("runs") else f" runs_dir={status.root.parent}"
    report = f"  python -m normexp.report study={status.name}{place}"
    if status.is_complete:
        return ["complete; next:", report]
    commands, told, tries = status.unfinished_commands(with_spent=False), "to finish", None
    if status.runs["running"]:
        told = "being trained now; should that stop"
    elif not commands and status.most_attempts:
        commands, tries = status.unfinished_commands(), status.most_attempts + 1
        told = "what failed was tried as often as max_attempts allows; to try once more"
    commands = commands or status.commands
    again = list(dict.fromkeys(_again(status, command, tries=tries) for command in commands))
    if not again:
        return ["incomplete, and study.yaml has no command to type again"]
    return [f"{told}, type again:", *(f"  {line}" for line in again)]


# What a training is compared by, the closest likeness first.
LIKENESSES = (
    ("model", "data", "norm", "batch_size", "micro_batch_size", "norm_batch_size"),
    ("model", "data", "norm", "batch_size"),
    ("model", "data", "batch_size"),
)


def read_timed(study_dir: Path) -> list[Result]:
    """The runs of a study that have a timing; what cannot be read is passed over."""
    timed = []
    for run_dir in Study(study_dir).list_runs():
        try:
            result = read_result(run_dir)
        except UserError:
            continue
        if result.timing.get("step_ms") and result.timing.get("stack_size"):
            timed.append(result)
    return timed


def expected_seconds(planned: Outcome, timed: Sequence[Result]) -> float | None:
    """Seconds of training for the missing runs of a cell; None where nothing like it is recorded.

    The median time of a step of one replica among the likest runs, times steps and replicas.
    """
    for keys in LIKENESSES:
        like = [
            run.timing["step_ms"] / run.timing["stack_size"]
            for run in timed
            if all(run.config.get(key) == planned.record.get(key) for key in keys)
        ]
        if like:
            steps = planned.record["num_steps"] * len(planned.missing)
            return statistics.median(like) * steps / 1000
    return None
