"""Which runs are trained together, and who trains them: claims and commits. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from normexp.training.config.spec import CellSpec
from normexp.training.records.files import read_json, write_json
from normexp.training.records.layout import (
    ATTEMPTS_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    STACKS,
    seed_dir,
    subfolders,
)
from normexp.training.records.locks import file_lock
from normexp.training.records.result import Result, Status, result_of, write_result
from normexp.training.records.stack_state import Member, lock_of, read_attempts
from normexp.training.records.study import CellState

# The most runs in a stack: on a CPU larger ones gain little, and a grid of learning rates still
# keeps several workers busy.
MOST_RUNS, MOST_RUNS_ON_GPU = 16, 64

Run = tuple[CellSpec, int]  # a cell and a seed


@dataclass(frozen=True)
class Stack:
    """Runs that train together: of one cell, or of several that differ in `lr` alone.

    Attributes:
        runs: all that a command asks for, ended or not, so that after an interruption the same
            command finds the same folder.
        apart: the failure of the stack that its run was taken from; empty without one.
    """

    runs: tuple[Run, ...]
    apart: str = ""

    @property
    def study_dir(self) -> Path:
        return self.runs[0][0].study_dir

    @cached_property
    def folder(self) -> Path:
        members = json.dumps([(spec.id, seed) for spec, seed in self.runs])
        return self.study_dir / STACKS / hashlib.sha256(members.encode()).hexdigest()[:16]

    def left(self, refused: Collection[str]) -> list[Run]:
        """The runs without a result, of cells that were not refused."""
        return [
            (spec, seed)
            for spec, seed in self.runs
            if spec.id not in refused and not has_ended(self.study_dir, spec.id, seed)
        ]

    def parts(self) -> list[Stack]:
        """What to train: this stack, or each of its runs if its folder says so."""
        attempts = read_attempts(self.folder)
        if not attempts.is_apart:
            return [self]
        return [Stack((run,), attempts.why) for run in self.runs]


def cut_stacks(cells: Iterable[CellSpec], *, on_gpu: bool = False) -> list[Stack]:
    """The stacks of a command, by the configs of its cells alone.

    Cells that differ in `lr` alone share one. `stack=false` leaves each run alone on a CPU, seed by
    seed over all cells: the first seeds are a figure already.
    """
    most = MOST_RUNS_ON_GPU if on_gpu else MOST_RUNS
    alone: list[Run] = []
    stacks: list[list[Run]] = []
    last: dict[str, list[Run]] = {}  # of cells that may share it
    for spec in cells:
        if spec.error:
            continue
        runs = [(spec, seed) for seed in spec.seeds]
        if spec.settings.stack is False and not on_gpu:
            alone += runs
            continue
        shared = _shared(spec)
        if shared not in last or len(last[shared]) + len(runs) > most:
            last[shared] = []
            stacks.append(last[shared])
        last[shared] += runs
    alone.sort(key=lambda run: run[1])
    return [Stack((run,)) for run in alone] + [Stack(tuple(runs)) for runs in stacks]


def _shared(spec: CellSpec) -> str:
    """Equal for cells that may be stacked."""
    if spec.settings.stack is False:
        return spec.id
    config = {**spec.config, **dict.fromkeys(("lr", "seed", "replicas"))}  # these may differ
    return json.dumps([config, spec.choices], sort_keys=True, default=str)


def has_ended(study_dir: Path, cell_id: str, seed: int) -> bool:
    """True if a run has a result, of whatever kind."""
    return (seed_dir(study_dir / cell_id, seed) / RESULT_FILE).exists()


@contextmanager
def claimed(locks: Iterable[Path]) -> Iterator[bool]:
    """Holds the locks of runs inside the block; yields False if another process has one.

    Afterwards removes the folders of cells that are empty.
    """
    with ExitStack() as held:
        for lock in sorted(locks):  # alike in all processes
            with suppress(FileExistsError):  # another process has just removed the folder
                lock.parent.mkdir(parents=True, exist_ok=True)
            held.callback(remove_if_empty, lock.parent)
            if not held.enter_context(file_lock(lock)):
                yield False
                return
        yield True


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def commit(folder: Path, results: Sequence[Result]) -> None:
    """Ends all runs of a stack at once. The caller holds their locks."""
    write_json(folder / RESULTS_FILE, {"results": [result.to_dict() for result in results]})
    settle(folder.parents[1], [(result.cell_id, result.seed) for result in results])


def settle(study_dir: Path, held: Collection[Member] = ()) -> None:
    """Writes the result.json of committed runs, and removes the folders of ended stacks.

    Every process does so with what it finds: the process that committed may have been killed.

    Args:
        held: the runs whose locks this process holds.
    """
    folders = subfolders(study_dir / STACKS)
    for folder in folders:
        path = folder / RESULTS_FILE
        for content in read_json(path, missing={"results": []})["results"]:
            result = result_of(content, path)
            member = (result.cell_id, result.seed)
            if member in held and not has_ended(study_dir, *member):
                write_result(seed_dir(study_dir / result.cell_id, result.seed), result)
    for folder in folders:  # also that of a stack that was cut into those above
        members = read_attempts(folder).members
        if members and all(has_ended(study_dir, *member) for member in members):
            remove(folder)


def remove(folder: Path) -> None:
    """Removes the folder of a stack; attempts.json goes last, so that a kill leaves no orphan."""
    for path in sorted(folder.glob("*"), key=lambda path: path.name == ATTEMPTS_FILE):
        path.unlink(missing_ok=True)
    remove_if_empty(folder)  # never its parent, in which others may be making theirs


def remove_failed(states: Iterable[CellState]) -> None:
    """Removes failed results, so that a new command tries them again.

    Leaves runs alone that another process trains. Claiming an ended run also removes its lock, if
    a process was killed between its result and the end of its claim.
    """
    for state in states:
        for run in state.results:
            lock = lock_of(state.directory, run.seed)
            has_failed = run.status is Status.FAILED
            if not has_failed and not lock.exists():
                continue
            with claimed([lock]) as is_mine:
                if is_mine and has_failed:
                    (seed_dir(state.directory, run.seed) / RESULT_FILE).unlink(missing_ok=True)
