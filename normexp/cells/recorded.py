"""What a cell has on disk already, and what is left to train. No torch."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normexp.config.spec import Start
from normexp.errors import UserError
from normexp.records.committed import publish_results
from normexp.records.environment import describe_environment
from normexp.records.files import StackLock
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
class Recorded:
    """The runs of a cell: ended ones, failed ones, and the seeds of the others, in seed order."""

    ended: list[Result]
    failed: list[Result]
    new: list[int]

    def missing(self, *, retry_failed: bool, max_attempts: int) -> list[int]:
        """Seeds to train: the new ones, and the failed ones that may be tried again."""
        again = [
            run.seed for run in self.failed if retry_failed and attempts_of(run) < max_attempts
        ]
        return sorted(self.new + again)


def attempts_of(failure: Result) -> int:
    """How often a failed run was tried."""
    return failure.attempts or 1


def recorded_runs(cell_dir: Path, seeds: Sequence[int]) -> Recorded:
    """What is recorded of these seeds. Raises UserError for a result that cannot be read."""
    recorded = Recorded([], [], [])
    for seed in seeds:
        run_dir = seed_dir(cell_dir, seed)
        if run_dir.is_file():
            raise UserError(f"{run_dir} is a file, where the folder of a run belongs; move it away")
        if not (run_dir / RESULT_FILE).is_file():
            recorded.new.append(seed)
            continue
        result = read_run(run_dir)
        (recorded.failed if result.status == "failed" else recorded.ended).append(result)
    return recorded


def stacks_of(cell_dir: Path, seeds: Sequence[int]) -> list[list[int]]:
    """The stacks to train `seeds` in: interrupted ones as they were, else consecutive seeds.

    A stack is named after its first and last seed; its checkpoint fits no other.
    """
    rest, stacks = set(seeds), []
    for stack in map(list, checkpointed_stacks(cell_dir).values()):
        if rest.issuperset(stack):
            stacks.append(stack)
            rest -= set(stack)
    return sorted(stacks + contiguous(sorted(rest)))


def contiguous(seeds: Sequence[int]) -> list[list[int]]:
    """Groups of consecutive seeds."""
    groups: list[list[int]] = []
    for seed in seeds:
        if groups and groups[-1][-1] == seed - 1:
            groups[-1].append(seed)
        else:
            groups.append([seed])
    return groups


def record_failure(start: Start, seeds: Sequence[int], reason: str) -> list[Result]:
    """One failed result per seed; for the one who holds the cell's lock."""
    before = {run.seed: attempts_of(run) for run in recorded_runs(start.directory, seeds).failed}
    environment = describe_environment()
    results = [
        Result(
            *(start.cell_id, seed, "failed", start.record, {}, environment),
            error=reason,
            attempts=before.get(seed, 0) + 1,
        )
        for seed in seeds
    ]
    for result in results:
        run_dir = seed_dir(start.directory, result.seed)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_result(run_dir, result)
    return results


def record_death(
    start: Start, seeds: Sequence[int], reason: str, last_output: str = ""
) -> list[Result]:
    """The results of `seeds` after the process that trained them died; failed where unended.

    None where somebody else trains the cell by now. What it printed last goes to the stack's log.
    """
    with StackLock(start.directory / LOCK_FILE) as held:
        if not held:
            return []
        publish_results(start.directory)
        ended = {run.seed: run for run in recorded_runs(start.directory, seeds).ended}
        lost = [seed for seed in start.seeds if seed not in ended]
        for stack in stacks_of(start.directory, lost):
            directory = stack_dir(start.directory, stack[0], stack[-1])
            directory.mkdir(parents=True, exist_ok=True)
            with open(directory / LOG_FILE, "a", encoding="utf-8") as file:
                file.write(f"{last_output.rstrip()}\n{reason}\n".lstrip("\n"))
        failed = record_failure(start, lost, reason)
    return sorted([*ended.values(), *failed], key=lambda run: run.seed)


LEAST_FREE = 64 * 1024  # bytes; below this torch's own errors on writing are for want of room


def full_disk(error: BaseException, directory: Path | None) -> str | None:
    """What to tell where an error came of a full disk, else None."""
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return _message(directory)
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, RuntimeError) and directory is not None and _free(directory) < LEAST_FREE:
        return _message(directory)
    return None


def _free(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _message(directory: Path | None) -> str:
    where = f" below {directory}" if directory is not None else ""
    return f"the disk is full{where}: make room and type the same line again, which goes on"
