"""A worker: walks the cells of a command and trains each stack whose locks are free.

Nothing is assigned. Every worker of every command walks the same list: it skips what is recorded,
refused or busy, takes the first stack that it can lock, trains and records it, and walks again. A
walk that finds nothing left to do is the last. A command without worker processes runs the same
loop itself.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from normexp.config.outcome import Outcome, missing_seeds, recorded_outcome
from normexp.config.process import importing_torch
from normexp.config.spec import CellSpec, norm_and_data, one_line
from normexp.errors import UserError
from normexp.records.files import full_disk_message, holder_of, is_held
from normexp.records.logs import messages_about
from normexp.records.paths import LOCK_FILE
from normexp.records.result import Status
from normexp.records.stacks import StackRecord
from normexp.sweeps.machine import WorkerSlot
from normexp.sweeps.walk import Positions, Walk, failed_outcome
from normexp.training.stopping import Interrupted, StopRequest, TrainingControl

logger = logging.getLogger(__name__)

TICK = 0.5  # seconds between walks while other processes train, or this worker's slot is taken


@dataclass(frozen=True)
class WorkerReady:
    """The worker has imported everything."""


@dataclass(frozen=True)
class StackTaken:
    """The worker prepares cells that may be one stack."""

    positions: Positions


@dataclass(frozen=True)
class StackBegan:
    """A stack of these cells begins to train."""

    record: StackRecord


@dataclass(frozen=True)
class StepsDone:
    """The optimizer steps that the stack in training has done."""

    done: int
    total: int


@dataclass(frozen=True)
class StackEnded:
    """The worker has left the cells that it took; the outcome of each that has one."""

    outcomes: dict[int, Outcome]  # by position


@dataclass(frozen=True)
class WorkerWaits:
    """Other processes train all that is left; one of them, and the cell that it trains."""

    holder: int | None
    cell_id: str


@dataclass(frozen=True)
class WalkEnded:
    """The worker found nothing left to do."""


Event = (
    WorkerReady
    | StackTaken
    | StackBegan
    | StepsDone
    | StackEnded
    | WorkerWaits
    | WalkEnded
    | logging.LogRecord
)


Report = Callable[[Event], None]


class WorkerState:
    """What a sweep knows of a worker, which is a process of its own or this process.

    Attributes:
        is_ready: it has imported everything.
        has_ended: it found nothing left to do.
        taken: the positions of the cells that it prepares or trains; () while idle.
        stack: the last stack of these cells that began to train.
        steps: of that stack: done, and in all.
        since: when it took the cells.
    """

    def __init__(self) -> None:
        self.is_ready = self.has_ended = False
        self.take(())

    def take(self, positions: Positions) -> None:
        self.taken = positions
        self.stack: StackRecord | None = None
        self.steps: tuple[int, int] = (0, 0)
        self.since = time.monotonic()


def work(
    walk: Walk, slot: WorkerSlot, report: Report, stop: StopRequest, *, shows_bar: bool = False
) -> bool:
    """Walks until nothing is left to do, a stop is requested, or a failure may affect the next.

    Returns:
        True if nothing is left to do.

    Args:
        report: called with each event.
        shows_bar: show a progress bar instead of reporting `StepsDone`.
    """
    on_steps = None if shows_bar else lambda done, total: report(StepsDone(done, total))
    control = TrainingControl(stop, on_steps)
    was_busy: set[Positions] = set()  # during the last walk
    has_said = False  # that it waits
    while not stop.requested and not walk.is_over:
        busy, has_taken = set(), False
        with slot.claim() as is_free:
            if not is_free and not has_said:
                has_said = True
                _refuse_mistakes(walk, report, stop)
                if walk.is_over or stop.requested:
                    return True
                logger.info(
                    "waiting, as with any number of workers: other commands use every core or GPU "
                    "of this machine (%s); workers=0 does not wait",
                    "; ".join(slot.commands()),
                )
            for cells in walk if is_free else ():
                positions = tuple(cells)
                if _are_busy(cells.values()):
                    busy.add(positions)
                # If its process has just ended, that process's command first records how.
                elif positions not in was_busy:
                    has_taken = True
                    report(StackTaken(positions))
                    outcomes = _train(walk, cells, report, control)
                    report(StackEnded(outcomes))
                    if _may_affect_next(outcomes.values()):
                        return False
                    break
        was_busy = busy
        if not has_taken:
            _report_busy(walk, busy, report)
            time.sleep(TICK)
    return walk.is_over


def _refuse_mistakes(walk: Walk, report: Report, stop: StopRequest) -> None:
    """Builds what is left, so that a mistake is refused before it waits for a core.

    Not where the user's own files are loaded, which a training notes as it loads them.
    """
    from normexp.cells.cell import check_cell

    for cells in walk:
        for position, cell in cells.items():
            if cell.sources or stop.requested:
                continue
            try:
                check_cell(cell)
            except Exception as error:  # user code may raise anything
                report(StackEnded({position: _record_error(error, cell, walk)}))


def _are_busy(cells: Iterable[CellSpec]) -> bool:
    """True if another process trains one of the cells."""
    with suppress(UserError, OSError):  # a lock that cannot be read, which `run_task` refuses
        return any(is_held(cell.directory / LOCK_FILE) for cell in cells)
    return False


def _report_busy(walk: Walk, busy: Collection[Positions], report: Report) -> None:
    """Names one of the processes that train what is left."""
    for position in (position for positions in busy for position in positions):
        cell = walk.log.cells[position]
        if (holder := holder_of(cell.directory / LOCK_FILE)) is not None:
            report(WorkerWaits(holder, cell.id))
            return


def _train(
    walk: Walk, cells: Mapping[int, CellSpec], report: Report, control: TrainingControl
) -> dict[int, Outcome]:
    """Trains cells as one stack if they can; returns the outcomes of those that have ended.

    Args:
        cells: by position.
    """
    from normexp.cells.run import Busy, run_task

    def begin(record: StackRecord) -> None:
        walk.log.begin(next(iter(cells.values())).directory.parent)
        report(StackBegan(record))

    started = time.monotonic()
    missing = {position for position, cell in cells.items() if _lacks(cell)}
    try:
        with messages_about(_name(cells.values())):
            errors = run_task([*cells.values()], begin, control)
        status = Status.FINISHED
    except Busy:  # another process was faster
        return {}
    except Interrupted:
        errors, status = {}, Status.STOPPED
    except Exception as error:  # user code may raise anything, and the other cells go on
        if len(cells) > 1 and full_disk_message(error, None) is None:  # one of them is at fault
            outcomes = {}
            for position, cell in cells.items():
                outcomes |= _train(walk, {position: cell}, report, control)
            return outcomes
        return {position: _record_error(error, cell, walk) for position, cell in cells.items()}
    outcomes = {}
    for position in missing:
        cell = cells[position]
        if (error := errors.get(cell.id)) is not None:
            walk.log.end(cell, Status.FAILED, error)
            outcomes[position] = recorded_outcome(cell, Status.FAILED, error)
        elif not _lacks(cell):
            outcomes[position] = recorded_outcome(cell, Status.FINISHED)
        elif status is Status.STOPPED:
            outcomes[position] = recorded_outcome(cell, status)
    for outcome in outcomes.values():
        outcome.seconds = (time.monotonic() - started) / len(outcomes)
    return outcomes


def _name(cells: Iterable[CellSpec]) -> str:
    first, *others = (cell.title for cell in cells)
    return f"{first} and {len(others)} more" if others else first


def _record_error(error: Exception, cell: CellSpec, walk: Walk) -> Outcome:
    """Like `outcome_of_error`; tells the other workers, except of a full disk."""
    outcome = outcome_of_error(error, cell)
    if not outcome.halts:
        walk.log.end(cell, outcome.status, outcome.error)
    return outcome


def outcome_of_error(error: Exception, cell: CellSpec) -> Outcome:
    """The outcome of a cell that raised an error; logs the traceback of an unexpected one."""
    from normexp.cells.devices import RankDied

    folder = None if cell.config is None else cell.directory
    if (full := full_disk_message(error, folder)) is not None:
        return Outcome(Status.FAILED, norm_and_data(cell), error=full, halts=True)
    if isinstance(error, UserError):
        return Outcome(Status.REFUSED, norm_and_data(cell), error=str(error))
    if not isinstance(error, RankDied):  # which has no traceback worth reading
        logger.error("%s: %s", cell.title, "".join(traceback.format_exception(error)))
    return failed_outcome(cell, Status.FAILED, one_line(error))


def _lacks(cell: CellSpec) -> bool:
    try:
        return bool(missing_seeds(cell))
    except UserError:  # an unreadable result, which `run_task` refuses
        return True


def _may_affect_next(outcomes: Iterable[Outcome]) -> bool:
    """True for a failure on a GPU, whose context may be broken, or for lack of memory."""
    errors = [outcome.error.lower() for outcome in outcomes if outcome.status is Status.FAILED]
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_initialized()
    return bool(errors) and (has_gpu or any("memory" in error for error in errors))


@contextmanager
def ready_to_train() -> Iterator[None]:
    """Imports torch and what trains; caches data sets and answers of probes inside the block."""
    warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, over attention
    with importing_torch():
        import normexp.cells.run  # noqa: F401
        from normexp.build import keeping_data
        from normexp.cells.cell import sharing_probes

    with keeping_data(), sharing_probes():
        yield
