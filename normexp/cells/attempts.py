"""The runs of a cell on disk: what is missing, in which stacks, and how failures are recorded.

Does not import torch.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normexp.config.spec import Outcome
from normexp.errors import UserError
from normexp.records.committed import publish_results
from normexp.records.environment import describe_environment
from normexp.records.files import FileLock
from normexp.records.paths import (
    LOCK_FILE,
    LOG_FILE,
    RESULT_FILE,
    checkpointed_stacks,
    seed_dir,
    stack_dir,
)
from normexp.records.result import Result, read_run, write_result


@dataclass(frozen=True)
class CellRecords:
    """The runs of a cell in order of their seeds: ended, failed, and the seeds of the others."""

    ended: list[Result]
    failed: list[Result]
    new: list[int]

    def missing(self, *, retry_failed: bool, max_attempts: int) -> list[int]:
        """The seeds to train: new ones, and failed ones that may be tried again."""
        again = [run.seed for run in self.failed if retry_failed and run.attempts < max_attempts]
        return sorted(self.new + again)


def read_records(cell_dir: Path, seeds: Sequence[int]) -> CellRecords:
    """Reads the results of these seeds. Raises UserError for one that cannot be read."""
    records = CellRecords([], [], [])
    for seed in seeds:
        run_dir = seed_dir(cell_dir, seed)
        if run_dir.is_file():
            raise UserError(f"{run_dir} is a file, and must be the folder of a run; move it away")
        if not (run_dir / RESULT_FILE).is_file():
            records.new.append(seed)
            continue
        result = read_run(run_dir)
        (records.failed if result.status == "failed" else records.ended).append(result)
    return records


def stacks_of(cell_dir: Path, seeds: Sequence[int]) -> list[list[int]]:
    """Splits seeds into stacks: interrupted stacks as they were, the rest by consecutive seeds.

    A stack is named after its first and last seed, and its checkpoint fits no other stack.
    """
    rest, stacks = set(seeds), []
    for stack in map(list, checkpointed_stacks(cell_dir).values()):
        if rest.issuperset(stack):
            stacks.append(stack)
            rest -= set(stack)
    return sorted(stacks + _consecutive(sorted(rest)))


def _consecutive(seeds: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for seed in seeds:
        if groups and groups[-1][-1] == seed - 1:
            groups[-1].append(seed)
        else:
            groups.append([seed])
    return groups


def record_failure(begun: Outcome, seeds: Sequence[int], reason: str) -> list[Result]:
    """Writes one failed result per seed. The caller must hold the cell's lock.

    Args:
        begun: the outcome of the cell when its training began.
    """
    assert begun.directory is not None
    attempts = {run.seed: run.attempts for run in read_records(begun.directory, seeds).failed}
    environment = describe_environment()
    results = [
        Result(
            *(begun.cell_id, seed, "failed", begun.record, {}, environment),
            error=reason,
            attempts=attempts.get(seed, 0) + 1,
        )
        for seed in seeds
    ]
    for result in results:
        run_dir = seed_dir(begun.directory, result.seed)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_result(run_dir, result)
    return results


def record_death(
    begun: Outcome, seeds: Sequence[int], reason: str, last_output: str = ""
) -> list[Result]:
    """Records that the process which trained a cell has died: runs that had not ended are failed.

    Args:
        begun: the outcome of the cell when its training began.
        last_output: what the process printed last; goes to the log of the stack.

    Returns:
        The results of `seeds`; none if another process already trains the cell.
    """
    assert begun.directory is not None
    with FileLock(begun.directory / LOCK_FILE) as held:
        if not held:
            return []
        publish_results(begun.directory)
        ended = {run.seed: run for run in read_records(begun.directory, seeds).ended}
        lost = [seed for seed in begun.missing if seed not in ended]
        for stack in stacks_of(begun.directory, lost):
            directory = stack_dir(begun.directory, stack[0], stack[-1])
            directory.mkdir(parents=True, exist_ok=True)
            with open(directory / LOG_FILE, "a", encoding="utf-8") as file:
                file.write(f"{last_output.rstrip()}\n{reason}\n".lstrip("\n"))
        failed = record_failure(begun, lost, reason)
    return sorted([*ended.values(), *failed], key=lambda run: run.seed)


LEAST_FREE = 64 * 1024  # bytes; with less, torch's write errors mean a full disk


def full_disk(error: BaseException, directory: Path | None) -> str | None:
    """Returns the message for an error that was caused by a full disk, None for any other error."""
    where = f" below {directory}" if directory is not None else ""
    message = f"the disk is full{where}: free some space, then run the same command to continue"
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return message
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, RuntimeError) and directory is not None and _free(directory) < LEAST_FREE:
        return message
    return None


def _free(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free
