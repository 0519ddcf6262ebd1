"""Which runs are trained together, and who trains them: claims and commits. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from normexp.config.cells import CellSpec
from normexp.records.files import file_lock, read_json, write_json
from normexp.records.result import (
    ATTEMPTS_FILE,
    LOCK_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    STACKS,
    Result,
    Status,
    result_of,
    seed_dir,
    subfolders,
    write_result,
)
from normexp.records.study import CellState, read_attempts

# The most runs in a stack: on a CPU larger ones gain little, and a grid of learning rates still
# keeps several workers busy.
MOST_RUNS, MOST_RUNS_ON_GPU = 16, 64

Run = tuple[CellSpec, int]  # a cell and a seed


@dataclass(frozen=True)
class Stack:
    """Runs that one worker claims: of one cell, or of several that differ in `lr` alone.

    Attributes:
        runs: all that a command asks for, ended or not, so that after an interruption the same
            command finds the same folder.
        apart: why its run is trained apart from others; empty if it is not.
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
        return [Stack((run,), attempts.why) for run in self.runs] if attempts.is_apart else [self]


def cut_stacks(cells: Iterable[CellSpec], most: int = MOST_RUNS) -> list[Stack]:
    """The stacks of a command: cells that differ in `lr` alone share one, up to `most` runs."""
    stacks: list[list[Run]] = []
    last: dict[str, list[Run]] = {}  # of cells that may share it
    for spec in (spec for spec in cells if not spec.error):
        runs, shared = [(spec, seed) for seed in spec.seeds], _shared(spec)
        if shared not in last or len(last[shared]) + len(runs) > most:
            last[shared] = []
            stacks.append(last[shared])
        last[shared] += runs
    return [Stack(tuple(runs)) for runs in stacks]


def _shared(spec: CellSpec) -> str:
    """Equal for cells that may be stacked."""
    config, lr = spec.config, spec.config["lr"]
    if config["stack"] is False or not isinstance(lr, int | float) or lr <= 0:
        return spec.id
    values = {key: value for key, value in config.items() if key not in ("lr", "seed", "replicas")}
    return json.dumps([values, dict(spec.choices)], sort_keys=True, default=str)


def has_ended(study_dir: Path, cell_id: str, seed: int) -> bool:
    """True if a run has a result, of whatever kind."""
    return (seed_dir(study_dir / cell_id, seed) / RESULT_FILE).exists()


@contextmanager
def claimed(folders: Iterable[Path]) -> Iterator[bool]:
    """Holds the locks of cells of one study inside the block; yields False if others have one.

    Afterwards removes those folders that are empty.
    """
    with ExitStack() as held:
        for folder in sorted(set(folders)):  # alike in all processes
            folder.mkdir(parents=True, exist_ok=True)
            held.callback(_remove_if_empty, folder)
            if not held.enter_context(file_lock(folder / LOCK_FILE)):
                yield False
                return
        yield True


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def commit(folder: Path, results: Sequence[Result]) -> None:
    """Ends all runs of a stack at once. The caller holds the locks of its cells."""
    write_json(folder / RESULTS_FILE, {"results": [result.to_dict() for result in results]})
    settle(folder.parents[1], {result.cell_id for result in results})


def settle(study_dir: Path, held: Collection[str]) -> None:
    """Writes the result.json of committed runs, and removes the folders of ended stacks.

    Whoever finds them does, as after a kill.

    Args:
        held: the cells whose locks this process holds.
    """
    for folder in subfolders(study_dir / STACKS):
        if (path := folder / RESULTS_FILE).exists():
            for content in read_json(path)["results"]:
                result = result_of(content, path)
                run_dir = seed_dir(study_dir / result.cell_id, result.seed)
                if result.cell_id in held and not (run_dir / RESULT_FILE).exists():
                    write_result(run_dir, result)
        members = read_attempts(folder).members
        if members and all(has_ended(study_dir, *member) for member in members):
            remove(folder)


def remove(folder: Path) -> None:
    """Removes the folder of a stack; attempts.json goes last, so that a kill leaves no orphan."""
    for path in sorted(folder.glob("*"), key=lambda path: path.name == ATTEMPTS_FILE):
        path.unlink(missing_ok=True)
    _remove_if_empty(folder)  # never its parent, in which others may be making theirs


def remove_failed(states: Iterable[CellState]) -> None:
    """Removes failed results, so that a new command tries them again; also tidies the study.

    Leaves cells alone that another process trains.
    """
    for state in states:
        failed = [run.seed for run in state.results if run.status is Status.FAILED]
        if failed or state.stacks:
            with claimed([state.directory]) as is_mine:
                if is_mine:
                    settle(state.directory.parent, {state.id})
                    for seed in failed:
                        (seed_dir(state.directory, seed) / RESULT_FILE).unlink(missing_ok=True)
