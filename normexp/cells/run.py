"""Trains cells that may be one stack: claims them, trains their missing runs, and records them.

The cells are one, or several that differ only in learning rate. A stack that has begun keeps its
members until all of them have results, whichever command claims them, so that interruptions change
no number. If a stack fails, its runs are trained one by one, so that one failure takes no other run
with it.
"""

from __future__ import annotations

import logging
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from normexp.batching.replicas import model_arguments
from normexp.batching.speed import suitable_threads
from normexp.cells.assembly import can_stack_rates
from normexp.cells.cell import Cell, prepare_cell
from normexp.cells.devices import RankDied, train_on_devices
from normexp.cells.stack import (
    Run,
    Stack,
    create_stack,
    record_failure,
    restore_stack,
)
from normexp.checks.network import probe_batch
from normexp.config.outcome import (
    Outcome,
    missing_seeds,
    recorded_outcome,
    records_of,
)
from normexp.config.spec import CellSpec, one_line
from normexp.errors import UserError
from normexp.records.files import (
    ensure_writable,
    file_lock,
    full_disk_message,
    remove_leftovers,
)
from normexp.records.history import AttemptEntry, append_entries, read_history
from normexp.records.paths import LOCK_FILE, LOG_FILE
from normexp.records.result import Status
from normexp.records.sources import source_line_of
from normexp.records.stacks import Member, StackRecord, end_stack, list_stacks
from normexp.training.stopping import Interrupted, TrainingControl

logger = logging.getLogger(__name__)

# Of the estimate in a dry run: steps at most, and seconds after which it begins no other.
TIMED_STEPS, TIMED_SECONDS = 6, 2.0

OnBegin = Callable[[StackRecord], None]


class Busy(Exception):
    """Another process trains one of the cells."""


def run_task(
    specs: Sequence[CellSpec], on_begin: OnBegin, control: TrainingControl
) -> dict[str, str]:
    """Claims cells, trains their missing runs, and records them.

    If the cells turn out not to stack, it trains nothing, and the caller walks its list again: each
    now has a stack, and may be claimed by itself.

    Args:
        on_begin: called before a stack trains, with its record.

    Returns:
        The first error of each cell whose runs have failed, by id.

    Raises:
        Busy: another process trains one of the cells.
        UserError: a cell that cannot be trained.
        Interrupted: stopped, with a checkpoint.
        Exception: any error of a user's code before a training.
    """
    study_dir, ids = specs[0].directory.parent, {spec.id for spec in specs}
    begun = list_stacks(study_dir, ids)
    members = {cell_id for record in begun for cell_id, _ in record.members}
    with claimed([study_dir / cell_id for cell_id in ids | members]) as folders:
        if list_stacks(study_dir, ids) != begun:  # changed before we had the locks
            raise Busy
        for folder in folders:  # temporary files of killed processes
            for path in (folder, *folder.glob("seed-*")):
                remove_leftovers(path)
        return StackRunner(specs, on_begin, control).run(begun)


@dataclass(frozen=True)
class StackRunner:
    """Trains the missing runs of cells whose locks this process holds, and records them.

    Attributes:
        cells: those prepared so far, by id.
        errors: by cell id, the first failure of its runs.
    """

    specs: Sequence[CellSpec]
    on_begin: OnBegin
    control: TrainingControl
    cells: dict[str, Cell] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def study_dir(self) -> Path:
        return self.specs[0].directory.parent

    def run(self, begun: Sequence[StackRecord]) -> dict[str, str]:
        """Trains first the begun stacks, unchanged, then all other runs; returns `errors`."""
        missing = {(spec.id, seed) for spec in self.specs for seed in missing_seeds(spec)}
        waiting: deque[Stack] = deque()
        for record in begun:
            members = set(record.members)
            if all(record.has_ended(self.study_dir, member) for member in members):
                end_stack(record)  # its process was killed before it could
            elif missing & members:
                known = [self._prepare(spec) for spec in self.specs if spec.id in record.rates]
                waiting.append(restore_stack(record, known))
            missing -= members
        new = [spec for spec in self.specs if any(spec.id == cell_id for cell_id, _ in missing)]
        stacks = self._arrange(new, missing)
        if len(new) > 1 and all(len(stack.record.rates) == 1 for stack in stacks):
            return {}  # each cell may now be claimed by itself
        waiting.extend(stacks)
        with self.control.stop.listening():
            while waiting:
                waiting.extendleft(reversed(self._train(waiting.popleft())))
        return self.errors

    def _prepare(self, spec: CellSpec) -> Cell:
        if spec.id not in self.cells:
            self.cells[spec.id] = prepare_cell(spec)
        return self.cells[spec.id]

    def _arrange(self, specs: Sequence[CellSpec], missing: Collection[Member]) -> list[Stack]:
        """New stacks: each run that failed or must train alone, and all others in as few as fit."""
        stacks: list[Stack] = []
        together: list[list[Run]] = []
        for cell, spec in [(self._prepare(spec), spec) for spec in specs]:
            failed = {run.seed: run for run in records_of(spec).failed}
            together.append([])
            for seed in (seed for seed in spec.seeds if (cell.spec.id, seed) in missing):
                if (last := failed.get(seed)) is not None:
                    run = [(cell, seed)]
                    stacks.append(create_stack(run, apart=last.apart, attempts=last.attempts))
                elif cell.alone is not None:
                    stacks.append(create_stack([(cell, seed)]))
                else:
                    together[-1].append((cell, seed))
        if len(specs) > 1:
            count = sum(len(spec.seeds) for spec in specs)
            if can_stack_rates(self._prepare(specs[0]), count):
                together = [[run for runs in together for run in runs]]
        return [*stacks, *(create_stack(runs) for runs in together if runs)]

    def _train(self, stack: Stack) -> list[Stack]:
        """Trains and records a stack. If a stack of several runs fails, returns each by itself."""
        error = self._earlier_failure(stack.record) or self._try(stack)
        if error is None:
            return []
        if len(stack.runs) > 1:
            logger.warning(
                "each run of %s is now trained by itself: %s", stack.record.directory, error
            )
            apart = [create_stack([run], apart=error) for run in stack.open_runs()]
            end_stack(stack.record)
            return apart
        record_failure(stack, error)
        where = f"{error} (see {stack.record.directory / LOG_FILE})"
        self.errors.setdefault(stack.cell.spec.id, where)
        return []

    def _earlier_failure(self, record: StackRecord) -> str | None:
        """Why a stack must not be tried again unchanged; None if it may.

        It raised, or its process died without progress: once for a single run, twice for several.
        """
        attempts = [
            attempt
            for attempt in read_history(self.study_dir).attempts
            if attempt.stack == record.id
        ]
        deaths = [
            attempt for attempt in attempts if attempt.checkpointed_at == record.checkpointed_at
        ]
        has_raised = any(not attempt.died for attempt in attempts)
        is_lost = has_raised or len(deaths) >= min(2, len(record.members))
        return attempts[-1].error if is_lost else None

    def _try(self, stack: Stack) -> str | None:
        """Trains and records a stack; returns why it failed, None if it did not."""
        record = stack.record
        self.on_begin(record)
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


def seconds_of_step(cell: Cell, threads: int | None = None) -> float:
    """The time of one forward and backward pass over a batch of one run, on a CPU; 0 elsewhere.

    The median of some micro-batches after the first, times their number. A stack of small networks
    takes less per run.

    Args:
        threads: the most CPU threads that the training gets; None: all of this process.
    """
    if cell.recipe.devices.type != "cpu":
        return 0.0
    sizes, network = cell.recipe.sizes, cell.build(cell.spec.seeds[0]).train()
    batch, seconds = probe_batch(cell.data, sizes.micro), list[float]()
    with suitable_threads(cell.elements_per_forward, threads), suppress(Exception):  # user code
        while len(seconds) < 2 or (len(seconds) < TIMED_STEPS and sum(seconds) < TIMED_SECONDS):
            start = time.perf_counter()
            network(*model_arguments(batch)).float().square().mean().backward()
            seconds.append(time.perf_counter() - start)
    timed = seconds[1:] or seconds  # the first also allocates
    return statistics.median(timed) * sizes.batch_size / sizes.micro if timed else 0.0


def plan_cell(spec: CellSpec, planned: dict[str, Outcome], threads: int | None = None) -> Outcome:
    """The outcome of a cell in a dry run, which writes nothing. Raises as `prepare_cell`.

    Args:
        planned: the outcomes of the command's cells so far, by folder.
        threads: the most CPU threads that the training gets; None: all of this process.
    """
    if spec.config is not None and (same := planned.get(str(spec.directory))) is not None:
        return same
    cell = prepare_cell(spec)
    outcome = recorded_outcome(cell.spec, Status.PLANNED)
    outcome.description, outcome.invalid = cell.description, cell.invalid
    outcome.step_seconds = seconds_of_step(cell, threads) if outcome.missing else 0.0
    planned[str(cell.spec.directory)] = outcome
    return outcome


@contextmanager
def claimed(folders: Iterable[Path]) -> Iterator[list[Path]]:
    """Holds the locks of cells inside the block. Afterwards removes folders that are empty.

    Args:
        folders: of the cells, all of one study.

    Raises:
        Busy: another process holds one of the locks; then this one holds none.
    """
    ordered = sorted(folders)  # alike in all processes
    ensure_writable(ordered[0].parent)
    with ExitStack() as held:
        try:
            for folder in ordered:
                missing = [path for path in folder.parents if not path.exists()]
                for path in [*reversed(missing), folder]:
                    held.callback(_remove_if_empty, path)
                    path.mkdir(exist_ok=True)
                if not held.enter_context(file_lock(folder / LOCK_FILE)):
                    raise Busy
        except FileNotFoundError as error:  # another process has just removed an empty folder
            raise Busy from error
        yield ordered


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
