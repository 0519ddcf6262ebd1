"""Trains one task: claims its cells, trains their missing runs as stacks, and records them.

A task is one cell, or several cells that differ only in learning rate and fit in one stack. A stack
that has begun keeps its members until all of them have results, whoever claims them and however
often it is interrupted, so that no number depends on that. If a stack fails, its runs are trained
one by one, so that one failure takes no other run with it.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from normexp.cells.assembly import OnSteps, scales_with_lr, will_stack
from normexp.cells.cell import Cell, prepare_cell
from normexp.cells.devices import RankDied, train_on_devices
from normexp.cells.evaluate import suggest_evaluation
from normexp.cells.naming import choices_in
from normexp.cells.recorded import has_evaluations, key_entry
from normexp.cells.stack import Stack, new_stack
from normexp.config.rules import validate
from normexp.config.spec import CellSpec, CellStatus, Outcome, name_of, one_line
from normexp.errors import UserError
from normexp.records.environment import describe_environment
from normexp.records.files import (
    ensure_writable,
    file_lock,
    full_disk,
    holder_of,
    remove_leftovers,
)
from normexp.records.history import AttemptEntry, KeyEntry, append_entries, read_history
from normexp.records.identity import place_of
from normexp.records.logs import collected_messages
from normexp.records.paths import LOCK_FILE, LOG_FILE, seed_dir
from normexp.records.result import CellRecords, Result, read_records, write_result
from normexp.records.stacks import StackRecord, end_stack, list_stacks
from normexp.training.stopping import Interrupted, StopRequest

logger = logging.getLogger(__name__)

OnBegin = Callable[[StackRecord, Sequence[str]], None]


def run_task(
    specs: Sequence[CellSpec],
    on_begin: OnBegin | None = None,
    on_steps: OnSteps | None = None,
    stop: StopRequest | None = None,
) -> list[Outcome]:
    """Trains the missing runs of a task; returns the outcome of each cell, in their order.

    Errors become outcomes: `refused` for a user's mistake, `failed` for any other error. If another
    process trains one of the cells, nothing is trained and all are `busy`. Cells that are `alone`
    do not stack with each other: each is to be trained as a task of its own. The outcomes are
    without results, which the records hold.

    Args:
        on_begin: called before a stack trains, with its record and the ids of the task's cells.
        on_steps: called with (step, num_steps) of a stack now and then; None shows a progress bar.
        stop: lets another thread request a stop. Ctrl-C is noticed while a stack trains.
    """
    started = time.monotonic()
    try:
        task = _prepare_task(specs)
        if task is None:
            return [Outcome("alone", name_of(spec)) for spec in specs]
        outcomes = _run(task, on_begin or (lambda *_: None), on_steps, stop or StopRequest())
    except Exception as error:  # user code may raise anything, and the other cells go on
        outcomes = _outcomes_of_error(error, specs)
    for outcome in outcomes:
        outcome.seconds = (time.monotonic() - started) / len(outcomes)
    return outcomes


@dataclass(frozen=True)
class TaskCell:
    """A prepared cell of a task, and the records of its requested seeds.

    Attributes:
        messages: logged while the cell was prepared; they go to the log of its stack.
        key: from when the cell was prepared; None if it cannot have one.
    """

    cell: Cell
    seeds: Sequence[int]
    messages: Sequence[str] = ()
    key: KeyEntry | None = None

    def records(self) -> CellRecords:
        return read_records(self.cell.directory, self.seeds)

    def missing(self) -> list[int]:
        cfg = self.cell.cfg
        return self.records().missing(retry_failed=cfg.retry_failed, max_attempts=cfg.max_attempts)

    def outcome(self, status: CellStatus, error: str = "", holder: int | None = None) -> Outcome:
        """The outcome with the present records; an ended cell with a failed run has failed."""
        records, cell = self.records(), self.cell
        if records.failed and status in ("finished", "skipped"):
            status, error = "failed", error or self._last_failure(records)
        is_evaluated = has_evaluations(cell.directory, records.ended, cell.evaluation.kinds)
        return Outcome(
            *(status, cell.title, cell.id, cell.directory, cell.record),
            error=error,
            invalid=cell.invalid,
            missing=self.missing(),
            memory=self.cell.memory,
            holder=holder,
            key=self.key if status in ("finished", "skipped") and is_evaluated else None,
        )

    def _last_failure(self, records: CellRecords) -> str:
        """The error of a failed run that is not retried, and how to retry it."""
        attempts = max(run.attempts for run in records.failed)
        can_retry = self.cell.cfg.retry_failed
        remedy = f"max_attempts={attempts + 1}" if can_retry else "retry_failed=true"
        return f"{records.failed[0].error} (attempt {attempts}; {remedy} tries again)"


# --- Claiming: the locks of all cells, or none ---------------------------------------------------


def _prepare_task(specs: Sequence[CellSpec]) -> list[TaskCell] | None:
    """Prepares the cells of a task; None if several do not stack, or one cannot be prepared."""
    try:
        first = _prepare(specs[0])
        num_runs = sum(len(spec.seeds) for spec in specs)
        if len(specs) > 1 and not (scales_with_lr(first.cell) and will_stack(first.cell, num_runs)):
            return None
        return [first, *map(_prepare, specs[1:])]
    except Exception:
        if len(specs) > 1:  # each is refused or fails for its own reason
            return None
        raise


def _prepare(spec: CellSpec) -> TaskCell:
    if spec.cfg is None:
        raise UserError(spec.error)
    validate(spec.cfg)
    with collected_messages() as messages:
        cell = prepare_cell(spec.cfg, spec.choices)
    key = key_entry(spec, cell.id, cell.files_digest, cell.evaluation.kinds)
    return TaskCell(cell, spec.seeds, messages, key)


def _run(
    task: Sequence[TaskCell], on_begin: OnBegin, on_steps: OnSteps | None, stop: StopRequest
) -> list[Outcome]:
    if task[0].cell.cfg.dry_run:
        return [each.outcome("planned") for each in task]
    is_missing = any(each.missing() for each in task)
    records = _stacks_of(task)
    if not is_missing and not _has_leftovers(task, records):
        return [_skip(each) for each in task]
    mates = _mates_of(task, records)
    with _claimed([*task, *mates]) as busy:
        if busy is not None or _stacks_of(task) != records:  # begun or ended before the lock
            return [busy or each.outcome("busy") if is_missing else _skip(each) for each in task]
        cells = {each.cell.id: each.cell for each in [*task, *mates]}
        claim = Claim(task, cells, on_begin, on_steps, stop)
        trained = {each.cell.id for each in task if each.missing()}
        try:
            with stop.listening():
                claim.train(records)
        except Interrupted:
            return [each.outcome("stopped" if each.missing() else "finished") for each in task]
    return [
        each.outcome("finished", claim.errors.get(each.cell.id, ""))
        if each.cell.id in trained
        else _skip(each)
        for each in task
    ]


def _stacks_of(task: Sequence[TaskCell]) -> list[StackRecord]:
    return list_stacks(task[0].cell.study_dir, [each.cell.id for each in task])


def _has_leftovers(task: Sequence[TaskCell], records: Sequence[StackRecord]) -> bool:
    """True if a process was killed between its last result and cleaning up."""
    study_dir = task[0].cell.study_dir
    return any((each.cell.directory / LOCK_FILE).exists() for each in task) or any(
        all(record.has_ended(study_dir, member) for member in record.members) for record in records
    )


def _mates_of(task: Sequence[TaskCell], records: Iterable[StackRecord]) -> list[TaskCell]:
    """The other cells of begun stacks: an earlier command asked for them too."""
    known = {each.cell.id: each for each in task}
    mates: dict[str, TaskCell] = {}
    for record in records:
        ids = {cell_id for cell_id, _ in record.members}
        template = next(known[cell_id] for cell_id in ids if cell_id in known).cell
        for cell_id in sorted(ids - {*known, *mates}):
            cfg = DictConfig(OmegaConf.merge(template.cfg, {"lr": record.rates[cell_id]}))
            with collected_messages():
                cell = prepare_cell(cfg, choices_in(template.record))
            if cell.id != cell_id:
                raise UserError(
                    f"{record.directory}: cannot repeat its cell {cell_id}; remove the folder"
                )
            mates[cell_id] = TaskCell(cell, [])
    return list(mates.values())


@contextmanager
def _claimed(cells: Sequence[TaskCell]) -> Iterator[Outcome | None]:
    """Yields None holding the locks of all cells, or a `busy` outcome holding none of them."""
    ensure_writable(cells[0].cell.study_dir)
    with ExitStack() as held:
        for each in sorted(cells, key=lambda each: each.cell.id):  # one order for all processes
            each.cell.directory.mkdir(parents=True, exist_ok=True)
            lock = each.cell.directory / LOCK_FILE
            if not held.enter_context(file_lock(lock)):
                held.close()
                yield each.outcome("busy", holder=holder_of(lock))
                return
        yield None


# --- Training: begun stacks as they were, then the other runs ------------------------------------


@dataclass(frozen=True)
class Claim:
    """The cells of a task while their locks are held."""

    task: Sequence[TaskCell]
    cells: Mapping[str, Cell]  # by id, including those of begun stacks
    on_begin: OnBegin
    on_steps: OnSteps | None
    stop: StopRequest
    errors: dict[str, str] = field(default_factory=dict)  # by cell, the first failure of its runs

    @property
    def study_dir(self) -> Path:
        return self.task[0].cell.study_dir

    def train(self, begun: Sequence[StackRecord]) -> None:
        """Trains all missing runs of the task, those of begun stacks first."""
        for cell in self.cells.values():  # files of processes that were killed
            for folder in (cell.directory, *cell.directory.glob("seed-*")):
                remove_leftovers(folder)
        waiting = deque(self._arrange(begun))
        while waiting:
            stack = waiting.popleft()
            error = self._earlier_failure(stack) or self._train(stack)
            if error is None:
                continue
            if len(stack.runs) > 1:
                logger.warning("each run of %s is trained apart: %s", stack.record.directory, error)
                waiting.extendleft(reversed(self._split(stack, error)))
            else:
                self._record_failure(stack, error)

    def _arrange(self, begun: Sequence[StackRecord]) -> list[Stack]:
        """Begun stacks, then failed runs one by one, then all new runs as one stack."""
        stacks = []
        missing = {(each.cell.id, seed) for each in self.task for seed in each.missing()}
        for record in begun:
            left = [m for m in record.members if not record.has_ended(self.study_dir, m)]
            if not left:
                end_stack(record)
            elif missing & set(left):
                runs = [(self.cells[cell_id], seed) for cell_id, seed in record.members]
                stacks.append(Stack(runs, record))
            missing -= set(record.members)
        new: list[tuple[Cell, int]] = []
        for each in self.task:
            records = each.records()
            for run in records.failed:
                if (each.cell.id, run.seed) in missing:
                    alone = [(each.cell, run.seed)]
                    stacks.append(new_stack(alone, apart=run.apart, attempts=run.attempts))
            own = [(each.cell, seed) for seed in records.new if (each.cell.id, seed) in missing]
            if each.cell.alone is None:
                new += own
            else:
                stacks += [new_stack([run]) for run in own]
        return [*stacks, new_stack(new)] if new else stacks

    def _earlier_failure(self, stack: Stack) -> str | None:
        """Why a stack as it is must not be tried again; None if it may.

        It raised, or its process died: a run alone once, several runs twice at one checkpoint.
        """
        everything = read_history(self.study_dir).attempts
        attempts = [each for each in everything if each.stack == stack.record.id]
        here = stack.record.checkpointed_at
        deaths = [each for each in attempts if each.checkpointed_at == here]
        has_raised = any(not each.died for each in attempts)
        is_lost = has_raised or len(deaths) >= min(2, len(stack.runs))
        return attempts[-1].error if is_lost else None

    def _train(self, stack: Stack) -> str | None:
        """Trains and records a stack; returns why it failed, None if it did not."""
        self.on_begin(stack.record, [each.cell.id for each in self.task])
        try:
            train_on_devices(stack, self.task[0].messages, self.stop, self.on_steps)
        except UserError:
            if (
                not stack.record.checkpoint.is_file()
            ):  # else the same line goes on from there, once mended
                end_stack(stack.record)
            raise
        except (Interrupted, RankDied):  # the checkpoint stays
            raise
        except Exception as error:
            if full_disk(error, stack.record.directory):
                raise
            with open(stack.record.directory / LOG_FILE, "a", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
            reason, at = one_line(error) + place_of(error), stack.record.checkpointed_at
            attempt = AttemptEntry(stack.record.id, reason, died=False, checkpointed_at=at)
            append_entries(self.study_dir, [attempt])
            return reason
        return None

    def _split(self, stack: Stack, reason: str) -> list[Stack]:
        """A stack of its own for each run without a result."""
        left = [run for run in stack.runs if not stack.has_ended(*run)]
        apart = [new_stack([run], apart=reason) for run in left]
        end_stack(stack.record)
        return apart

    def _record_failure(self, stack: Stack, reason: str) -> None:
        """Writes the failed result of a stack of one."""
        ((cell, seed),) = stack.runs
        run_dir = seed_dir(cell.directory, seed)
        run_dir.mkdir(parents=True, exist_ok=True)
        failed = Result(
            *(cell.id, seed, "failed", cell.record, {}, describe_environment()),
            error=reason,
            attempts=stack.record.attempts + 1,
            apart=stack.record.apart,
        )
        write_result(run_dir, failed)
        end_stack(stack.record)
        self.errors.setdefault(cell.id, f"{reason} (see {stack.record.directory / LOG_FILE})")


# --- Outcomes ------------------------------------------------------------------------------------


def _skip(each: TaskCell) -> Outcome:
    """The outcome of a cell that had all its runs."""
    suggest_evaluation(each.cell, each.seeds)
    return each.outcome("skipped")


def _outcomes_of_error(error: Exception, specs: Sequence[CellSpec]) -> list[Outcome]:
    full = full_disk(error, specs[0].study_dir)
    status, reason = "failed", full or one_line(error)
    if not full and isinstance(error, UserError):
        status, reason = "refused", str(error)
    elif not full and not isinstance(error, RankDied):  # which has no traceback worth reading
        logger.error("%s: %s", specs[0].title, "".join(traceback.format_exception(error)))
    return [Outcome(status, name_of(spec), error=reason, halts=bool(full)) for spec in specs]
