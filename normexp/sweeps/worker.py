"""A worker: claims the open tasks of a command, one after another, and trains them.

Nothing is assigned. Every worker of every command walks the same list, skips what is recorded or
busy, and trains what it can lock. A command without other processes is the same loop.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from normexp.config.imports import importing_torch
from normexp.config.spec import CellSpec, Outcome
from normexp.errors import INTERRUPTED
from normexp.records.files import is_held
from normexp.records.paths import LOCK_FILE
from normexp.records.stacks import StackRecord
from normexp.sweeps.machine import Place
from normexp.sweeps.tasks import Board, Task
from normexp.training.stopping import StopRequest

logger = logging.getLogger(__name__)

TICK = 0.5  # seconds between two walks while all open tasks are busy, or all slots are taken


# --- What a worker tells its command -------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """Everything is imported."""


@dataclass(frozen=True)
class Took:
    """The worker has a task; it prepares its cells."""

    task: Task


@dataclass(frozen=True)
class Began:
    """A stack of the task begins to train; `cell_ids` are those of the task's cells."""

    stack: StackRecord
    cell_ids: Sequence[str]


@dataclass(frozen=True)
class Steps:
    """Optimizer steps done of the stack in training."""

    done: int
    total: int


@dataclass(frozen=True)
class Note:
    """A line of normexp's own log."""

    level: int
    text: str


@dataclass(frozen=True)
class Ended:
    """The task has outcomes, one for each cell; their results are left out."""

    task: Task
    outcomes: Sequence[Outcome]


@dataclass(frozen=True)
class PutBack:
    """The task is open again, to be trained cell by cell; or because a process trains a cell."""

    holder: int | None = None
    cell_id: str = ""


Event = Ready | Took | Began | Steps | Note | Ended | PutBack
Report = Callable[[Event], None]


# --- The loop ------------------------------------------------------------------------------------


class Trainer(Protocol):
    """As `cells.run.run_task`."""

    def __call__(
        self,
        specs: Sequence[CellSpec],
        on_begin: Callable[[StackRecord, Sequence[str]], None] | None,
        on_steps: Callable[[int, int], None] | None,
        stop: StopRequest | None,
    ) -> list[Outcome]: ...


def work(
    cells: Sequence[CellSpec],
    board: Board,
    place: Place,
    report: Report,
    stop: StopRequest,
    *,
    run_task: Trainer,
    number: int = 1,
    shows_bar: bool = False,
) -> None:
    """Trains open tasks until none is left, or a stop is requested, or a failure may spread.

    Args:
        number: of this worker, on the board.
        shows_bar: a progress bar of its own in place of `Steps`.
    """
    busy: dict[Task, Path] = {}  # task to the lock of another process
    is_told = False

    def is_free(task: Task) -> bool:
        return task not in busy or not is_held(busy[task])

    def on_begin(stack: StackRecord, cell_ids: Sequence[str]) -> None:
        report(Began(stack, cell_ids))

    on_steps = None if shows_bar else lambda done, total: report(Steps(done, total))
    while board.num_open and not stop.requested:
        with place.slot() as has_slot:
            task = board.take(number, is_free) if has_slot else None
            if not has_slot and not is_told:
                logger.info("waiting: other commands use every core or GPU of this machine")
                is_told = True
            if task is not None:
                report(Took(task))
                given = [cells[index] for index in task]
                outcomes = run_task(given, on_begin, on_steps, stop)
                if outcomes[0].status == "busy":
                    assert outcomes[0].directory is not None
                    busy[task] = outcomes[0].directory / LOCK_FILE
                _give_back(task, outcomes, board, report)
                if _may_spread(outcomes):
                    return
        if task is None:
            time.sleep(TICK)


def _give_back(task: Task, outcomes: Sequence[Outcome], board: Board, report: Report) -> None:
    first = outcomes[0]
    if first.status in ("busy", "alone"):
        report(PutBack(first.holder, first.cell_id))
        board.put_back(task, alone=first.status == "alone")
    else:
        report(Ended(task, outcomes))
        board.end(task)


def _may_spread(outcomes: Sequence[Outcome]) -> bool:
    """True if a failure may affect later tasks: a broken GPU context, too little memory."""
    errors = [outcome.error.lower() for outcome in outcomes if outcome.status == "failed"]
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_initialized()
    return bool(errors) and (has_gpu or any("memory" in error for error in errors))


# --- As a process of its own ---------------------------------------------------------------------


class _Pipe(logging.Handler):
    """Sends events and log messages to the command."""

    def __init__(self, end: Connection) -> None:
        super().__init__()
        self._end = end

    def send(self, event: Event) -> None:
        with suppress(OSError):  # the command is gone, and its worker ends soon
            self._end.send(event)

    def emit(self, record: logging.LogRecord) -> None:
        self.send(Note(record.levelno, record.getMessage()))


def main(
    end: Connection,
    output: Connection,
    cells: Sequence[CellSpec],
    board: Board,
    place: Place,
    number: int,
    run_task: Trainer | None,
) -> None:
    """Runs `work` in this process, which ends with its parent: at a checkpoint if one trains.

    Args:
        output: the file for all that is printed; only its descriptor is used.
        run_task: None: `cells.run.run_task`.
    """
    os.setsid()  # Ctrl-C is for the parent, which asks by SIGTERM
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    pipe = _Pipe(end)
    package = logging.getLogger("normexp")
    package.addHandler(pipe)
    package.setLevel(logging.INFO)
    package.propagate = False
    logging.raiseExceptions = False  # a log on a full disk must not fill the screen as well
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with loaded(run_task) as trainer:
            _limit_threads()
            pipe.send(Ready())
            work(cells, board, place, pipe.send, StopRequest(), run_task=trainer, number=number)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@contextmanager
def loaded(run_task: Trainer | None = None) -> Iterator[Trainer]:
    """Imports torch and what trains; data sets stay in memory inside the block."""
    if run_task is not None:
        yield run_task
        return
    with importing_torch():
        from normexp.cells.cell import keeping_data
        from normexp.cells.run import run_task as trains

    with keeping_data():
        yield trains


def _limit_threads() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _end_with_parent() -> None:
    """Asks this process to stop, as the parent would have done."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
