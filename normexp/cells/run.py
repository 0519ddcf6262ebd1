"""Trains one task: claims its cells, trains their missing runs as stacks, and records them.

A task is one cell, or several cells that differ only in learning rate and fit in one stack. A stack
that has begun keeps its members until all of them have results, whichever command claims them, so
that interruptions change no number. If a stack fails, its runs are trained one by one, so that one
failure takes no other run with it.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from normexp.cells.assembly import can_stack_rates
from normexp.cells.cell import Cell, prepare_cell
from normexp.cells.devices import RankDied, train_on_devices
from normexp.cells.finished import suggest_evaluation
from normexp.cells.recorded import cache_entry, has_evaluations
from normexp.cells.stack import Run, Stack, create_stack, record_failure, restore_stack
from normexp.config.rules import validate
from normexp.config.spec import CellSpec, CellStatus, Outcome, norm_and_data, one_line
from normexp.errors import UserError
from normexp.records.files import (
    ensure_writable,
    file_lock,
    full_disk_message,
    holder_of,
    remove_leftovers,
)
from normexp.records.history import AttemptEntry, CacheEntry, append_entries, read_history
from normexp.records.identity import source_line_of
from normexp.records.paths import LOCK_FILE, LOG_FILE
from normexp.records.result import CellRecords, Result, read_records
from normexp.records.stacks import StackRecord, end_stack, list_stacks
from normexp.training.stopping import Interrupted, TrainingControl

logger = logging.getLogger(__name__)

OnBegin = Callable[[StackRecord, Sequence[str]], None]


def run_task(
    specs: Sequence[CellSpec],
    on_begin: OnBegin | None = None,
    control: TrainingControl | None = None,
) -> list[Outcome]:
    """Trains the missing runs of a task; returns the outcome of each cell, in their order.

    Errors become outcomes: `refused` for a user's mistake, `failed` for any other error. If another
    process trains one of the cells, nothing is trained and all are `busy`. If the cells turn out
    not to stack, nothing is trained and all are `alone`: each must be a task of its own. Outcomes
    carry no results; read those from the records.

    Args:
        on_begin: called before a stack trains, with its record and the ids of the task's cells.
        control: lets another thread request a stop and follow the steps. Ctrl-C is noticed while a
            stack trains.
    """
    started = time.monotonic()
    try:
        cells = _prepare_together(specs) if len(specs) > 1 else [_prepare(specs[0])]
        if cells:
            runner = TaskRunner(cells, on_begin or (lambda *_: None), control or TrainingControl())
            outcomes = runner.run()
        else:
            outcomes = [Outcome("alone", norm_and_data(spec)) for spec in specs]
    except Exception as error:  # user code may raise anything, and the other cells go on
        outcomes = _outcomes_of_error(error, specs)
    for outcome in outcomes:
        outcome.seconds = (time.monotonic() - started) / len(outcomes)
    return outcomes


def _outcomes_of_error(error: Exception, specs: Sequence[CellSpec]) -> list[Outcome]:
    full = full_disk_message(error, specs[0].study_dir)
    status, reason = "failed", full or one_line(error)
    if not full and isinstance(error, UserError):
        status, reason = "refused", str(error)
    elif not full and not isinstance(error, RankDied):  # which has no traceback worth reading
        logger.error("%s: %s", specs[0].title, "".join(traceback.format_exception(error)))
    return [Outcome(status, norm_and_data(spec), error=reason, halts=bool(full)) for spec in specs]


# --- The cells of a task -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TaskCell:
    """A prepared cell of a task, and the records of its requested seeds.

    Attributes:
        cache_entry: lets later commands skip the cell unprepared; None if they cannot.
    """

    cell: Cell
    seeds: Sequence[int]
    cache_entry: CacheEntry | None

    def records(self) -> CellRecords:
        return read_records(self.cell.directory, self.seeds)

    def missing(self) -> list[int]:
        cfg = self.cell.spec.composed
        return self.records().missing(retry_failed=cfg.retry_failed, max_attempts=cfg.max_attempts)

    def outcome(self, status: CellStatus, error: str = "") -> Outcome:
        """The outcome by the present records; a cell with a failed run has failed."""
        records, cell, ended = self.records(), self.cell, ("finished", "skipped")
        if status in ended and records.failed:
            status, error = "failed", error or self._last_failure(records.failed)
        is_evaluated = has_evaluations(cell.directory, records.ended, cell.recipe.evaluations)
        return Outcome(
            *(status, cell.title, cell.id, cell.directory, cell.record),
            error=error,
            invalid=cell.invalid,
            missing=self.missing(),
            memory=cell.memory,
            cache_entry=self.cache_entry if status in ended and is_evaluated else None,
        )

    def skipped(self) -> Outcome:
        """The outcome of a cell whose runs were all recorded before."""
        suggest_evaluation(self.cell, self.seeds)
        return self.outcome("skipped")

    def _last_failure(self, failed: Sequence[Result]) -> str:
        """The error of a failed run that is not retried, and how to retry it."""
        attempts = max(run.attempts for run in failed)
        can_retry = self.cell.spec.composed.retry_failed
        remedy = f"max_attempts={attempts + 1}" if can_retry else "retry_failed=true"
        return f"{failed[0].error} (attempt {attempts}; {remedy} tries again)"


def _prepare(spec: CellSpec) -> TaskCell:
    if spec.cfg is None:
        raise UserError(spec.error)
    validate(spec.cfg)
    cell = prepare_cell(spec)
    entry = cache_entry(spec, cell.id, cell.files_digest, cell.recipe.evaluations)
    return TaskCell(cell, spec.seeds, entry)


def _prepare_together(specs: Sequence[CellSpec]) -> list[TaskCell]:
    """Prepares cells to be stacked; none if they do not stack, or one cannot be prepared."""
    with suppress(Exception):  # the cells are tried alone then, and the one at fault reports it
        first = _prepare(specs[0])
        if can_stack_rates(first.cell, sum(len(spec.seeds) for spec in specs)):
            return [first, *map(_prepare, specs[1:])]
    return []


@dataclass(frozen=True)
class TaskRunner:
    """Claims the cells of a task, trains their missing runs, and records them.

    Attributes:
        errors: by cell id, the first failure of its runs.
    """

    cells: Sequence[TaskCell]
    on_begin: OnBegin
    control: TrainingControl
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def study_dir(self) -> Path:
        return self.cells[0].cell.study_dir

    def run(self) -> list[Outcome]:
        """Claims the cells, trains what is missing, and returns the outcome of each."""
        if self.cells[0].cell.spec.composed.dry_run:
            return [each.outcome("planned") for each in self.cells]
        is_missing = any(each.missing() for each in self.cells)
        records = self._begun_records()
        if not is_missing and not self._has_leftovers(records):
            return [each.skipped() for each in self.cells]
        cells = [each.cell for each in self.cells]
        begun = [restore_stack(record, cells) for record in records]
        cells += [cell for stack in begun for cell, _ in stack.runs]
        with _claimed(cells) as busy:
            if busy is None and self._begun_records() != records:  # changed before we had the locks
                busy = self.cells[0].outcome("busy")
            if busy is not None:
                return [busy if is_missing else each.skipped() for each in self.cells]
            for cell in cells:  # temporary files of killed processes
                for folder in (cell.directory, *cell.directory.glob("seed-*")):
                    remove_leftovers(folder)
            return self._train_claimed(begun)

    def _begun_records(self) -> list[StackRecord]:
        return list_stacks(self.study_dir, [each.cell.id for each in self.cells])

    def _has_leftovers(self, records: Iterable[StackRecord]) -> bool:
        """True if a process was killed between its last result and cleaning up."""
        return any((each.cell.directory / LOCK_FILE).exists() for each in self.cells) or any(
            all(record.has_ended(self.study_dir, member) for member in record.members)
            for record in records
        )

    # --- Training: first the begun stacks, unchanged, then all other runs

    def _train_claimed(self, begun: Sequence[Stack]) -> list[Outcome]:
        """Trains what is still missing once the locks are held."""
        missing = [each for each in self.cells if each.missing()]
        try:
            with self.control.stop.listening():
                self._train_all(begun)
        except Interrupted:
            return [
                each.outcome("stopped" if each.missing() else "finished") for each in self.cells
            ]
        return [
            each.outcome("finished", self.errors.get(each.cell.id, ""))
            if each in missing
            else each.skipped()
            for each in self.cells
        ]

    def _train_all(self, begun: Sequence[Stack]) -> None:
        """Trains all missing runs; the runs of a stack that fails, one by one."""
        waiting = deque(self._arrange(begun))
        while waiting:
            stack = waiting.popleft()
            error = self._earlier_failure(stack.record) or self._train(stack)
            if error is not None and len(stack.runs) > 1:
                logger.warning(
                    "each run of %s is now trained by itself: %s", stack.record.directory, error
                )
                apart = [create_stack([run], apart=error) for run in stack.open_runs()]
                end_stack(stack.record)
                waiting.extendleft(reversed(apart))
            elif error is not None:
                record_failure(stack, error)
                where = f"{error} (see {stack.record.directory / LOG_FILE})"
                self.errors.setdefault(stack.cell.id, where)

    def _arrange(self, begun: Sequence[Stack]) -> list[Stack]:
        """Begun stacks with a missing run; runs that failed or train alone; all others in one."""
        stacks: list[Stack] = []
        new: list[Run] = []
        missing = {(each.cell, seed) for each in self.cells for seed in each.missing()}
        for stack in begun:
            still_open = stack.open_runs()
            if not still_open:
                end_stack(stack.record)
            elif missing & set(still_open):
                stacks.append(stack)
            missing -= set(stack.runs)
        for each in self.cells:
            failed = {run.seed: run for run in each.records().failed}
            for seed in each.seeds:
                if (run := (each.cell, seed)) not in missing:
                    continue
                if (last := failed.get(seed)) is not None:
                    stacks.append(create_stack([run], apart=last.apart, attempts=last.attempts))
                elif each.cell.alone is not None:
                    stacks.append(create_stack([run]))
                else:
                    new.append(run)
        return [*stacks, create_stack(new)] if new else stacks

    def _earlier_failure(self, record: StackRecord) -> str | None:
        """Why a stack must not be tried again unchanged; None if it may.

        It raised, or its process died without progress: once for a single run, twice for several.
        """
        attempts = [
            each for each in read_history(self.study_dir).attempts if each.stack == record.id
        ]
        deaths = [each for each in attempts if each.checkpointed_at == record.checkpointed_at]
        has_raised = any(not each.died for each in attempts)
        is_lost = has_raised or len(deaths) >= min(2, len(record.members))
        return attempts[-1].error if is_lost else None

    def _train(self, stack: Stack) -> str | None:
        """Trains and records a stack; returns why it failed, None if it did not."""
        record = stack.record
        self.on_begin(record, [each.cell.id for each in self.cells])
        try:
            train_on_devices(stack, self.control)
        except UserError:
            if not record.checkpoint.is_file():  # with one, the corrected command resumes there
                end_stack(record)
            raise
        except (Interrupted, RankDied):  # the checkpoint stays
            raise
        except Exception as error:
            if full_disk_message(error, record.directory):
                raise
            with open(record.directory / LOG_FILE, "a", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
            reason, at = one_line(error) + source_line_of(error), record.checkpointed_at
            attempt = AttemptEntry(record.id, reason, died=False, checkpointed_at=at)
            append_entries(self.study_dir, [attempt])
            return reason
        return None


@contextmanager
def _claimed(cells: Iterable[Cell]) -> Iterator[Outcome | None]:
    """Yields None with the locks of all cells, or a `busy` outcome if one of them is taken."""
    by_id = {cell.id: cell for cell in cells}
    ensure_writable(next(iter(by_id.values())).study_dir)
    with ExitStack() as held:
        for _, cell in sorted(by_id.items()):  # one order for all processes
            cell.directory.mkdir(parents=True, exist_ok=True)
            lock = cell.directory / LOCK_FILE
            if not held.enter_context(file_lock(lock)):
                yield Outcome("busy", cell.title, cell.id, cell.directory, holder=holder_of(lock))
                return
        yield None
