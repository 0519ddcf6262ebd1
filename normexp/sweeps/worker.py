"""A process that trains one task after another for a sweep: `python -m normexp.sweeps.worker FD`.

Imports torch once. A thread reads the pipe from the sweep's process. If the sweep stops or dies, a
training ends at its next checkpoint; any other work ends at once, because nothing is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from normexp.config.spec import CellSpec, Outcome, name_of
from normexp.sweeps.display import Display
from normexp.sweeps.grouping import Task
from normexp.sweeps.log import StudyLog
from normexp.sweeps.messages import Begins, Ended, Note, Ready, Steps
from normexp.sweeps.queueing import Queue
from normexp.training.stopping import StopRequest

STOPPED = 130


class Link(logging.Handler):
    """The worker's end of the pipe: receives tasks, sends reports and log messages."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.tasks: queue.SimpleQueue[tuple[CellSpec, ...] | None] = queue.SimpleQueue()
        self.stop: StopRequest | None = None  # set while a cell trains
        self.is_idle = False

    def listen(self) -> None:
        """Runs in a thread of its own until the end of the process."""
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, OSError):
                message = None
            if isinstance(message, tuple):
                self.tasks.put(message)
            elif self.stop is not None:
                self.stop.requested = True
                return
            elif self.is_idle:
                self.tasks.put(None)
                return
            else:
                os._exit(STOPPED)

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the sweep's process is gone; `listen` handles it
            self.connection.send(message)

    def emit(self, record: logging.LogRecord) -> None:
        self.send(Note(record.levelno, record.getMessage()))


class TaskReport:
    """Reports on one task to the sweep's process, which can stop it once a cell trains."""

    def __init__(self, link: Link, stop: StopRequest) -> None:
        self.link = link
        self.stop = stop

    def on_begin(self, position: int, begun: Outcome) -> None:
        self.link.stop = self.stop
        if not self.link.tasks.empty():  # a stop that arrived together with this task
            self.stop.requested = True
        self.link.send(Begins(position, begun))

    def on_steps(self, done: int, total: int) -> None:
        self.link.send(Steps(done, total))


def main() -> int:
    """Exit code: 0 after the last task, 130 after a stop."""
    link = open_link(int(sys.argv[1]))
    import torch

    from normexp.cells.cell import keeping_data
    from normexp.cells.run import run_task

    def run(task: tuple[CellSpec, ...], report: TaskReport, stop: StopRequest) -> Ended:
        outcomes = run_task(task, report.on_begin, report.on_steps, stop)
        errors = [each.error for each in outcomes if each.status in ("failed", "alone")]
        return Ended(outcomes, _is_spent(errors))

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with keeping_data():
        return serve(link, run)


def open_link(descriptor: int) -> Link:
    """Opens the worker's end of the pipe, starts its thread, and sends log messages there."""
    logging.raiseExceptions = False  # a log on a full disk must not fill the screen as well
    link = Link(Connection(descriptor))
    threading.Thread(target=link.listen, daemon=True).start()
    package = logging.getLogger("normexp")
    package.addHandler(link)
    package.setLevel(logging.INFO)
    package.propagate = False
    return link


def serve(link: Link, run: Callable[[tuple[CellSpec, ...], TaskReport, StopRequest], Ended]) -> int:
    """Runs tasks until the pipe closes or a stop is requested; returns the exit code."""
    link.send(Ready())
    while True:
        link.is_idle = True
        task = link.tasks.get()
        link.is_idle = False
        if task is None:
            return 0
        stop = StopRequest()
        try:
            ended = run(task, TaskReport(link, stop), stop)
        finally:
            link.stop = None
        link.send(ended)
        if stop.requested:
            return STOPPED


def _is_spent(errors: Sequence[str]) -> bool:
    """True if a failure may affect later tasks: a broken GPU context, too little memory."""
    import torch

    told = [error.lower() for error in errors if error]
    return bool(told) and (torch.cuda.is_initialized() or any("memory" in e for e in told))


if __name__ == "__main__":
    sys.exit(main())


TICK = 0.5  # seconds between checks of other processes' locks


def run_in_turn(
    cells: Sequence[CellSpec],
    tasks: Sequence[Task],
    log: StudyLog,
    display: Display,
    *,
    fail_fast: bool,
) -> list[Outcome]:
    """Trains tasks one by one; returns an outcome per cell, in order, `stopped` after a stop.

    Args:
        tasks: for each task, the indices of its cells.
    """
    from normexp.cells.cell import keeping_data  # torch

    outcomes: dict[int, Outcome] = {}
    with keeping_data():
        _run(Queue(tasks), outcomes, cells, log, display, fail_fast=fail_fast)
    return [
        outcomes.get(index, Outcome("stopped", name_of(cell), missing=cell.seeds))
        for index, cell in enumerate(cells)
    ]


def _run(
    queue: Queue,
    outcomes: dict[int, Outcome],
    cells: Sequence[CellSpec],
    log: StudyLog,
    display: Display,
    *,
    fail_fast: bool,
) -> None:
    """Fills `outcomes` until the queue is empty or an outcome ends the sweep."""
    from normexp.cells.run import run_task

    while queue:
        task = queue.take()
        if task is None:
            queue.tell_of_waiting([])
            time.sleep(TICK)
            continue
        given = [cells[index] for index in task]

        def on_begin(position: int, begun: Outcome, given: list[CellSpec] = given) -> None:
            log.begin(given[position], begun)

        ended = dict(zip(task, run_task(given, on_begin), strict=True))
        busy = [outcome for outcome in ended.values() if outcome.status == "busy"]
        if busy:
            queue.put_off(task, busy[0])
            continue
        queue.put_back_apart([index for index in task if ended[index].status == "alone"])
        new = {index: outcome for index, outcome in ended.items() if outcome.status != "alone"}
        outcomes |= new
        ends_all = any(_ends_all(outcome, fail_fast=fail_fast) for outcome in new.values())
        display.is_stopping = ends_all
        for index, outcome in new.items():
            log.settle(cells[index], outcome)
            display.ended(cells[index].title, outcome)
        if ends_all:
            return


def _ends_all(outcome: Outcome, *, fail_fast: bool) -> bool:
    failed = outcome.status == "failed" and fail_fast
    return outcome.halts or outcome.status == "stopped" or failed
