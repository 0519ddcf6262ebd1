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
from normexp.records.files import (
    ensure_writable,
    file_lock,
    read_json,
    remove_leftovers,
    write_json,
)
from normexp.records.paths import (
    ATTEMPTS_FILE,
    LOCK_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    STACKS,
    seed_dir,
    subfolders,
)
from normexp.records.result import Result, Status, read_result, result_of, write_result
from normexp.records.study import read_attempts

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

    @cached_property
    def specs(self) -> list[CellSpec]:
        return list({spec.id: spec for spec, _ in self.runs}.values())

    @property
    def study_dir(self) -> Path:
        return self.specs[0].directory.parent

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
        """The stacks to train: this one, or what its folder says to train by itself."""
        attempts = read_attempts(self.folder)
        if attempts.parts == "cells":
            groups = [[run for run in self.runs if run[0].id == spec.id] for spec in self.specs]
        elif attempts.parts == "runs":
            groups = [[run] for run in self.runs]
        else:
            return [self]
        whole = [Stack(tuple(group), attempts.why) for group in groups]
        return [part for stack in whole for part in stack.parts()]


def cut_stacks(cells: Iterable[CellSpec], most: int = MOST_RUNS) -> list[Stack]:
    """The stacks of a command: cells that differ in `lr` alone share one, up to `most` runs."""
    stacks: list[list[Run]] = []
    last: dict[str, list[Run]] = {}  # of cells that may share it
    for spec in cells:
        runs, shared = [(spec, seed) for seed in spec.seeds], _shared(spec)
        known = last.get(shared) if shared else None
        if known is not None and len(known) + len(runs) <= most:
            known += runs
            continue
        stacks.append(runs)
        if shared:
            last[shared] = runs
    return [Stack(tuple(runs)) for runs in stacks]


def _shared(spec: CellSpec) -> str:
    """Equal for cells that may be stacked; empty for one that may not."""
    config = spec.values
    if config["stack"] is False or not isinstance(config["lr"], int | float) or config["lr"] <= 0:
        return ""
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
    ordered = sorted(set(folders))  # alike in all processes
    ensure_writable(ordered[0].parent)
    with ExitStack() as held:
        try:
            for folder in ordered:
                missing = [path for path in folder.parents if not path.exists()]
                for path in [*reversed(missing), folder]:
                    held.callback(_remove_if_empty, path)
                    path.mkdir(exist_ok=True)
                if not held.enter_context(file_lock(folder / LOCK_FILE)):
                    yield False
                    return
        except FileNotFoundError:  # another process has just removed an empty folder
            yield False
            return
        for folder in ordered:  # temporary files of killed processes
            for path in (folder, *folder.glob("seed-*")):
                remove_leftovers(path)
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
    _remove_if_empty(folder)
    _remove_if_empty(folder.parent)


def remove_failed(specs: Iterable[CellSpec]) -> None:
    """Removes failed results, so that a new command tries them again; also tidies the study.

    Leaves cells alone that another process trains.
    """
    for spec in specs:
        study_dir = spec.directory.parent
        if not spec.directory.is_dir():
            continue
        ended = [seed for seed in spec.seeds if has_ended(study_dir, spec.id, seed)]
        runs = [seed_dir(spec.directory, seed) for seed in ended]
        failed = [path for path in runs if _has_failed(path)]
        if failed or (study_dir / STACKS).is_dir():
            with claimed([spec.directory]) as is_mine:
                if is_mine:
                    settle(study_dir, {spec.id})
                    for run_dir in failed:
                        (run_dir / RESULT_FILE).unlink(missing_ok=True)


def _has_failed(run_dir: Path) -> bool:
    with suppress(ValueError):  # a UserError: unreadable, which the closing table says
        return read_result(run_dir).status is Status.FAILED
    return False
