"""What a stack leaves in its folder: its members and, for a moment, the results of all of them.

The runs of a stack end together. If a process were killed between the first and the last
result.json, the rest would be trained again without their neighbours. So ended.json, one atomic
file, holds all results before each run gets its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from normexp.errors import UserError
from normexp.records.files import read_json, write_json
from normexp.records.paths import (
    CHECKPOINT_FILE,
    ENDED_FILE,
    MEMBERS_FILE,
    RESULT_FILE,
    seed_dir,
)
from normexp.records.result import Result, read_result, write_result

Member = tuple[str, int]  # cell id and seed


def shared_dir(study_dir: Path, members: Iterable[Member]) -> Path:
    """The directory of a stack of several cells; depends on the order of its members."""
    text = json.dumps([list(member) for member in members])
    return study_dir / "stacks" / hashlib.sha256(text.encode()).hexdigest()[:16]


def write_members(stack_dir: Path, members: Iterable[Member]) -> None:
    """Writes the members of a stack; before its first checkpoint."""
    write_json(stack_dir / MEMBERS_FILE, {"members": [list(member) for member in members]})


def interrupted_stacks(study_dir: Path) -> Iterator[tuple[Path, list[Member]]]:
    """Yields the stacks of several cells that have a checkpoint, with their members, by name.

    Raises:
        UserError: a members.json that cannot be read.
    """
    for checkpoint in sorted(study_dir.glob(f"stacks/*/{CHECKPOINT_FILE}")):
        path = checkpoint.parent / MEMBERS_FILE
        try:
            members = [(str(cell_id), int(seed)) for cell_id, seed in read_json(path)["members"]]
        except (UserError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} cannot be read; remove its folder and run again") from error
        yield checkpoint.parent, members


def commit_results(stack_dir: Path, results: Sequence[Result]) -> None:
    """Writes ended.json: from here on the stack has ended, whatever happens to this process."""
    write_json(stack_dir / ENDED_FILE, {"results": [result.to_dict() for result in results]})


def publish_results(cell_dir: Path) -> None:
    """Gives the results of all ended stacks to the runs of a cell; removes their checkpoints.

    The caller must hold the cell's lock. Replaces results of failures and no others. A stack of
    several cells stays until each of them has its results.

    Raises:
        UserError: an ended.json was edited by hand.
    """
    for path in sorted(cell_dir.glob(f"stacks/*/{ENDED_FILE}")):
        for result in _read_ended(path):
            _publish(cell_dir, result)
        _remove(path)
    for path in sorted(cell_dir.parent.glob(f"stacks/*/{ENDED_FILE}")):
        try:
            results = _read_ended(path)
        except FileNotFoundError:  # the process that published its last cell has removed it
            continue
        for result in results:
            if result.cell_id == cell_dir.name:
                _publish(cell_dir, result)
        if not any(_is_unpublished(cell_dir.parent / run.cell_id, run.seed) for run in results):
            _remove(path)


def _read_ended(path: Path) -> list[Result]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [Result.from_dict(result) for result in content["results"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} was edited by hand; remove it and run again") from error


def _publish(cell_dir: Path, result: Result) -> None:
    if _is_unpublished(cell_dir, result.seed):
        write_result(seed_dir(cell_dir, result.seed), result)


def _is_unpublished(cell_dir: Path, seed: int) -> bool:
    run_dir = seed_dir(cell_dir, seed)
    return not (run_dir / RESULT_FILE).is_file() or read_result(run_dir).status == "failed"


def _remove(path: Path) -> None:
    (path.parent / CHECKPOINT_FILE).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
