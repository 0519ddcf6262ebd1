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
from logging.handlers import QueueHandler
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from normexp.config.process import importing_torch
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


@dataclass(frozen=True)
class Took:
    """The worker has a task and prepares its cells; () once it has imported everything."""

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
class Ended:
    """The outcomes of the task, one for each cell, without results.

    After `busy`, where another process trains a cell, and `alone` the task is open again.
    """

    task: Task
    outcomes: Sequence[Outcome]


Event = Took | Began | Steps | Ended | logging.LogRecord
Report = Callable[[Event], None]
OnBegin = Callable[[StackRecord, Sequence[str]], None]
OnSteps = Callable[[int, int], None]
# As `cells.run.run_task`.
Trainer = Callable[
    [Sequence[CellSpec], OnBegin | None, OnSteps | None, StopRequest | None], list[Outcome]
]


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
        shows_bar: a progress bar of its own in place of `Steps`.
    """
    busy: dict[Task, Path] = {}  # task to the lock of another process
    is_told = False

    on_steps = None if shows_bar else lambda done, total: report(Steps(done, total))
    while board.num_open and not stop.requested:
        with place.slot() as has_slot:
            held = {task for task, lock in busy.items() if is_held(lock)}
            task = board.take(number, held) if has_slot else None
            if not has_slot and not is_told:
                logger.info("waiting: other commands use every core or GPU of this machine")
                is_told = True
            if task is not None:
                report(Took(task))
                given = [cells[index] for index in task]
                outcomes = run_task(given, lambda *begun: report(Began(*begun)), on_steps, stop)
                report(Ended(task, outcomes))
                if outcomes[0].status == "busy":
                    assert outcomes[0].directory is not None
                    busy[task] = outcomes[0].directory / LOCK_FILE
                    board.put_back(task)
                elif outcomes[0].status == "alone":
                    board.put_back(task, alone=True)
                else:
                    board.end(task)
                if _may_spread(outcomes):
                    return
        if task is None:
            time.sleep(TICK)


def _may_spread(outcomes: Sequence[Outcome]) -> bool:
    """True if a failure may affect later tasks: a broken GPU context, too little memory."""
    errors = [outcome.error.lower() for outcome in outcomes if outcome.status == "failed"]
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_initialized()
    return bool(errors) and (has_gpu or any("memory" in error for error in errors))


class _Pipe(QueueHandler):
    """Sends events and log messages to the command."""

    def __init__(self, end: Connection) -> None:
        super().__init__(SimpleQueue())  # unused
        self._end = end

    def enqueue(self, record: Event) -> None:
        with suppress(OSError):  # the command is gone, and its worker ends soon
            self._end.send(record)


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
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            pipe.enqueue(Took(()))
            work(cells, board, place, pipe.enqueue, StopRequest(), run_task=trainer, number=number)
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


def _end_with_parent() -> None:
    """Asks this process to stop, as the parent would have done."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
