"""Trains one task: locks its cells, trains their missing runs, records them.

A task is one cell, or several cells that differ only in learning rate and fit in one stack.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from normexp.cells.assembly import OnSteps, will_stack
from normexp.cells.attempts import (
    CellRecords,
    full_disk,
    read_records,
    record_failure,
    stacks_of,
)
from normexp.cells.cell import Cell, prepare_cell
from normexp.cells.devices import train_on_devices
from normexp.cells.evaluate import suggest_evaluation
from normexp.cells.logs import collected_messages
from normexp.cells.stack import Stack
from normexp.config.rules import validate
from normexp.config.spec import CellSpec, CellStatus, Outcome, name_of, one_line
from normexp.errors import UserError
from normexp.records.committed import interrupted_stacks, publish_results
from normexp.records.files import FileLock, ensure_writable, remove_leftovers
from normexp.records.paths import CHECKPOINT_FILE, ENDED_FILE, LOCK_FILE, LOG_FILE
from normexp.training.stopping import Interrupted, StopRequest

logger = logging.getLogger(__name__)

OnBegin = Callable[[int, Outcome], None]


def run_task(
    specs: Sequence[CellSpec],
    on_begin: OnBegin | None = None,
    on_steps: OnSteps | None = None,
    stop: StopRequest | None = None,
) -> list[Outcome]:
    """Trains the missing runs of a task; returns the outcome of each cell, in their order.

    Errors become outcomes: `refused` for a user's mistake, `failed` for any other error. If another
    process trains one of the cells, nothing is trained and all are `busy`. A cell that is `alone`
    must be trained as a task of its own, because it does not stack with the others or because their
    stack failed.

    Args:
        on_begin: called before a cell trains, with its position in the task and its outcome so far.
        on_steps: called with (step, num_steps) of a stack now and then; None shows a progress bar.
        stop: lets another thread request a stop. Ctrl-C is noticed in any case.
    """
    started = time.monotonic()
    try:
        outcomes = _run(specs, on_begin or (lambda *_: None), on_steps, stop or StopRequest())
    except Exception as error:  # user code may raise anything, and the other cells go on
        outcomes = _outcomes_of_error(error, specs)
    settled = [outcome for outcome in outcomes if outcome.status != "alone"]
    for outcome in settled:
        outcome.seconds = (time.monotonic() - started) / len(settled)
    return outcomes


def _run(
    specs: Sequence[CellSpec], on_begin: OnBegin, on_steps: OnSteps | None, stop: StopRequest
) -> list[Outcome]:
    first = _prepare(0, specs[0])
    if len(specs) > 1 and not will_stack(first.cell, sum(len(spec.seeds) for spec in specs)):
        return [Outcome("alone", name_of(spec)) for spec in specs]
    cells = [first, *(_prepare(position, spec) for position, spec in enumerate(specs[1:], start=1))]
    if cells[0].cell.cfg.dry_run:
        return [each.outcome("planned") for each in cells]
    open_cells = _open_cells(cells)
    trained: set[str] = set()
    error = ""
    if open_cells:
        with _claimed(open_cells) as busy:
            if busy is not None:
                return [busy] * len(specs)
            for each in open_cells:
                each.clean_up()
            open_cells = _open_cells(cells)  # cleaning up, or another process, may leave none
            trained = {each.cell.id for each in open_cells}
            try:
                error = _train(open_cells, on_begin, on_steps, stop) if open_cells else ""
            except Interrupted:
                return [each.outcome("stopped") for each in cells]
    return [_settle(each, error, trained, is_alone=len(cells) == 1) for each in cells]


@dataclass(frozen=True)
class TaskCell:
    """A prepared cell of a task, and the records of its requested seeds.

    Attributes:
        messages: logged while the cell was prepared; they go to the log of its stack.
    """

    position: int
    cell: Cell
    seeds: list[int]
    messages: list[str]

    def records(self) -> CellRecords:
        return read_records(self.cell.directory, self.seeds)

    def missing(self) -> list[int]:
        """The seeds to train."""
        cfg = self.cell.cfg
        return self.records().missing(retry_failed=cfg.retry_failed, max_attempts=cfg.max_attempts)

    def outcome(self, status: CellStatus, error: str = "", holder: int | None = None) -> Outcome:
        """The outcome with the present records; an ended cell with a failed run has failed."""
        records = self.records()
        if records.failed and status in ("finished", "skipped"):
            status, error = "failed", error or self._last_failure(records)
        return Outcome(
            *(status, self.cell.title, self.cell.id, self.cell.directory, self.cell.record),
            results=sorted(records.ended + records.failed, key=lambda run: run.seed),
            error=error,
            invalid=self.cell.invalid,
            missing=self.missing(),
            holder=holder,
        )

    def _last_failure(self, records: CellRecords) -> str:
        """The error of a failed run that is not retried, and how to retry it."""
        attempts = max(run.attempts for run in records.failed)
        can_retry = self.cell.cfg.retry_failed
        remedy = f"max_attempts={attempts + 1}" if can_retry else "retry_failed=true"
        return f"{records.failed[0].error} (attempt {attempts}; {remedy} tries again)"

    def fits_shared_stack(self) -> bool:
        """True if runs are missing, and none of them has failed or has a checkpoint in the cell."""
        records = self.records()
        has_begun = any(self.cell.directory.glob(f"stacks/*/{CHECKPOINT_FILE}"))
        return bool(records.new) and not records.failed and not has_begun

    def lock(self) -> FileLock:
        self.cell.directory.mkdir(parents=True, exist_ok=True)
        return FileLock(self.cell.directory / LOCK_FILE)

    def clean_up(self) -> None:
        """Removes what a killed process left and publishes its results. Needs the lock."""
        folder = self.cell.directory
        for each in (folder, *folder.glob("*"), *folder.glob("stacks/*")):
            remove_leftovers(each)
        publish_results(folder)


def _prepare(position: int, spec: CellSpec) -> TaskCell:
    if spec.cfg is None:
        raise UserError(spec.error)
    validate(spec.cfg)
    with collected_messages() as messages:
        cell = prepare_cell(spec.cfg, spec.choices)
    return TaskCell(position, cell, spec.seeds, messages)


def _open_cells(cells: Sequence[TaskCell]) -> list[TaskCell]:
    """The cells that this task trains; of several cells, only those that share a stack."""
    if len(cells) == 1:
        return [each for each in cells if each.missing()]
    fitting = [each for each in cells if each.fits_shared_stack()]
    return fitting if len(fitting) > 1 else []


@contextmanager
def _claimed(cells: Sequence[TaskCell]) -> Iterator[Outcome | None]:
    """Yields None holding the locks of all cells, or a `busy` outcome holding none of them."""
    ensure_writable(cells[0].cell.study_dir)
    with ExitStack() as held:
        for each in sorted(cells, key=lambda each: each.cell.id):  # one order for all processes
            lock = each.lock()
            if not held.enter_context(lock):
                held.close()
                yield each.outcome("busy", holder=lock.holder())
                return
        yield None


def _train(
    cells: Sequence[TaskCell], on_begin: OnBegin, on_steps: OnSteps | None, stop: StopRequest
) -> str:
    """Trains all stacks of a task; returns the first failure. Needs the locks.

    The failure of a stack of one cell is recorded. A stack of several cells raises its failure.
    """
    for each in cells:
        on_begin(each.position, each.outcome("running"))
    failures = []
    for stack in _stacks_of(cells):
        remove_leftovers(stack.directory)
        try:
            train_on_devices(stack, cells[0].messages, stop, on_steps)
        except (UserError, Interrupted):
            raise
        except Exception as error:
            if len(cells) > 1 or full_disk(error, stack.cell.directory):
                raise
            failures.append(_record_failure(cells[0], stack, error))
    return failures[0] if failures else ""


def _stacks_of(cells: Sequence[TaskCell]) -> list[Stack]:
    """Interrupted stacks as they were, then the other missing runs."""
    by_id = {each.cell.id: each for each in cells}
    missing = {cell_id: each.missing() for cell_id, each in by_id.items()}

    def stack_of(parts: Mapping[str, list[int]]) -> Stack:
        return Stack([(by_id[cell_id].cell, seeds) for cell_id, seeds in parts.items()])

    if len(cells) == 1:
        (cell_id,) = missing
        split = stacks_of(cells[0].cell.directory, missing[cell_id])
        return [stack_of({cell_id: seeds}) for seeds in split]
    stacks = []
    for _, members in interrupted_stacks(cells[0].cell.study_dir):
        parts: dict[str, list[int]] = {}
        for cell_id, seed in members:
            parts.setdefault(cell_id, []).append(seed)
        if all(set(seeds) <= set(missing.get(cell_id, [])) for cell_id, seeds in parts.items()):
            stacks.append(stack_of(parts))
            for cell_id, seeds in parts.items():
                missing[cell_id] = [seed for seed in missing[cell_id] if seed not in seeds]
    rest = {cell_id: seeds for cell_id, seeds in missing.items() if seeds}
    return [*stacks, stack_of(rest)] if len(rest) > 1 else stacks


def _record_failure(each: TaskCell, stack: Stack, error: Exception) -> str:
    """Puts the traceback into the log of a stack and one line into each result."""
    log = stack.directory / LOG_FILE
    with open(log, "a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    record_failure(each.outcome("running"), stack.seeds, one_line(error))
    return f"{one_line(error)} (see {log})"


def _settle(each: TaskCell, error: str, trained: set[str], *, is_alone: bool) -> Outcome:
    """The outcome of a cell when its task has ended."""
    if not is_alone and each.missing():
        return Outcome("alone", each.cell.title)
    if each.cell.id in trained:
        return each.outcome("finished", error)
    cell = each.cell
    ended = f"stacks/*/{ENDED_FILE}"
    if any([*cell.directory.glob(ended), *cell.study_dir.glob(ended)]):
        with each.lock() as held:  # a process was killed between its last result and cleaning up
            if held:
                each.clean_up()
    suggest_evaluation(cell, each.seeds)
    return each.outcome("skipped")


def _outcomes_of_error(error: Exception, specs: Sequence[CellSpec]) -> list[Outcome]:
    full = full_disk(error, specs[0].study_dir)
    if full is not None:
        return [Outcome("failed", name_of(spec), error=full, halts=True) for spec in specs]
    if len(specs) > 1:
        if isinstance(error, UserError):  # each cell will be refused for its own reason
            return [Outcome("alone", name_of(spec)) for spec in specs]
        logger.warning("each learning rate is trained alone: %s", one_line(error))
        return [Outcome("alone", name_of(spec), error=one_line(error)) for spec in specs]
    if isinstance(error, UserError):
        return [Outcome("refused", name_of(specs[0]), error=str(error))]
    logger.error("%s: %s", specs[0].title, "".join(traceback.format_exception(error)))
    return [Outcome("failed", name_of(specs[0]), error=one_line(error))]
