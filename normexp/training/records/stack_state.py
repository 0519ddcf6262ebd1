"""The stacks of a study that have begun: their attempts, locks and progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from normexp.errors import UserError
from normexp.training.records.files import read_json, write_json
from normexp.training.records.layout import (
    ATTEMPTS_FILE,
    LOCK_FILE,
    PROGRESS_FILE,
    STACKS,
    subfolders,
)
from normexp.training.records.locks import holder_of

Member = tuple[str, int]  # the id of a cell, and a seed


def lock_of(cell_dir: Path, seed: int) -> Path:
    """The lock of a run; beside its folder, which is there only once it trains."""
    return cell_dir / f"{LOCK_FILE}-{seed}"


@dataclass
class Attempts:
    """attempts.json of a stack, written before it trains.

    Attributes:
        members: the runs that are trained.
        threads: CPU threads of the first attempt, kept because last digits depend on them.
        count: attempts since the last checkpoint, without those that were interrupted.
        checkpointed_at: time of the checkpoint from which the last attempt began; 0 without one.
        is_apart: True if each run is trained as a stack of its own instead.
        why: the failure of the whole stack; empty if it was split only because its runs train in
            turn.
    """

    members: list[Member] = field(default_factory=list)
    threads: int = 0
    count: int = 0
    checkpointed_at: int = 0
    is_apart: bool = False
    why: str = ""


def read_attempts(folder: Path) -> Attempts:
    """Reads attempts.json of a stack; no attempts without the file."""
    attempts = Attempts(**read_json(folder / ATTEMPTS_FILE, missing={}))
    attempts.members = [(cell, seed) for cell, seed in attempts.members]
    return attempts


def write_attempts(folder: Path, attempts: Attempts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ATTEMPTS_FILE, asdict(attempts))


@dataclass(frozen=True)
class StackState:
    """A stack that has begun.

    Attributes:
        members: the runs that it trains.
        holder: the process that trains it now, with its command; empty if none does.
        step, total: optimizer steps done, and planned.
        metrics: the last training loss and validation metric, as means over its runs.
    """

    folder: Path
    members: Sequence[Member]
    holder: str = ""
    step: int = 0
    total: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_stacks(study_dir: Path) -> list[StackState]:
    """The stacks that have begun, except those that were split into their runs."""
    states = []
    for folder in subfolders(study_dir / STACKS):
        try:
            attempts = read_attempts(folder)
            progress = read_json(folder / PROGRESS_FILE, missing={})
        except UserError:  # reported by the process that trains it
            continue
        if attempts.is_apart:
            continue
        holders = [holder_of(lock_of(study_dir / cell, seed)) for cell, seed in attempts.members]
        holder = holders[0] if holders and all(holders) else ""
        states.append(StackState(folder, attempts.members, holder, **progress))
    return states
