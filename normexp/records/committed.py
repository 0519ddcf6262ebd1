"""ended.json: the results of a whole stack in one file, before each becomes its run's own.

Runs of a stack end together. Were a process killed after the first result.json and before the
last, the others would be trained once more, without the neighbours that they were trained with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from normexp.errors import UserError
from normexp.records.files import write_json
from normexp.records.paths import CHECKPOINT_FILE, ENDED_FILE, RESULT_FILE, seed_dir
from normexp.records.result import Result, read_result, write_result


def commit_results(stack_dir: Path, results: Sequence[Result]) -> None:
    """From here on the stack has ended, whatever happens to this process."""
    write_json(stack_dir / ENDED_FILE, {"results": [result.to_dict() for result in results]})


def publish_results(cell_dir: Path) -> None:
    """Gives the results of all ended stacks to the runs of a cell; their checkpoints go.

    Only for the one who holds the cell's lock. A result that is there already stays as it is,
    unless it is of a failure. A stack of several cells stays until each of them was here.

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
        except FileNotFoundError:  # the process that publishes another cell of it was the last one
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
