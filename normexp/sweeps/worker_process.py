"""The worker processes of a sweep: both ends of each, and how one dies."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import QueueHandler
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from queue import SimpleQueue

from normexp.config.spec import CellSpec
from normexp.errors import INTERRUPTED
from normexp.records.stacks import StackRecord
from normexp.sweeps.tasks import Task, TaskBoard, WorkerSlot
from normexp.sweeps.worker import Event, RunTask, TaskTaken, importing_run_task, work
from normexp.training.stopping import StopRequest

SPAWN = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks


class WorkerState:
    """What is known of one that works: a worker process, or this process.

    Attributes:
        task: the cells it has at the moment; none while it has none.
        stack: the last stack of its task that began to train.
        since: when it took its task.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.take(())

    def take(self, task: Task) -> None:
        self.task = task
        self.stack: StackRecord | None = None
        self.steps: tuple[int, int] = (0, 0)  # done, and all of its stack
        self.since = time.monotonic()


class Worker(WorkerState):
    """One worker process.

    Args:
        number: of it on the board, from 1; no other worker of the command has had it.
    """

    def __init__(
        self,
        number: int,
        slot: WorkerSlot,
        cells: Sequence[CellSpec],
        board: TaskBoard,
        run_task: RunTask | None = None,
    ) -> None:
        super().__init__()
        self.number = number
        self.slot = slot
        self._shown = 0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  as long as the worker
        self.connection, theirs = SPAWN.Pipe(duplex=False)
        # A connection is what multiprocessing hands over; its descriptor is what the worker takes.
        with theirs, Connection(os.dup(self._output.fileno()), readable=False) as output:
            arguments = (theirs, output, cells, board, slot, number, run_task)
            self.process = SPAWN.Process(target=main, args=arguments)
            # It inherits that Ctrl-C is blocked, until it has left the terminal.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with slot.environment():
                    self.process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def receive(self) -> Event | None:
        """Its next event; None once it has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return None

    def new_output(self) -> str:
        """What it has printed since this was last called."""
        text = self._read(self._shown)
        self._shown += len(text)
        return text.decode(errors="replace")

    def last_output(self) -> str:
        """The end of all that it has printed."""
        return self._read(0)[-4000:].decode(errors="replace")

    def _read(self, start: int) -> bytes:
        descriptor = self._output.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size - start, start)

    def describe_death(self) -> str:
        """Why it ended, in one line; it has ended."""
        code = self.process.exitcode or 0
        if code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"killed by signal {-code}, {signal.Signals(-code).name}{memory}"
        lines = [line.strip() for line in self.last_output().splitlines() if line.strip()]
        return f"its process ended with code {code}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        """Ends it at once, if it has not ended."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()
        self._output.close()


# --- In the worker's process ----------------------------------------------------------------------


def main(
    end: Connection,
    output: Connection,
    cells: Sequence[CellSpec],
    board: TaskBoard,
    slot: WorkerSlot,
    number: int,
    run_task: RunTask | None,
) -> None:
    """Runs `work` in this process, which ends with its parent: at a checkpoint if one trains.

    Args:
        end: of the pipe to the command, which gets events and log messages.
        output: the file for all that is printed; only its descriptor is used.
    """
    os.setsid()  # Ctrl-C is for the parent, which asks by SIGTERM
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    pipe = Pipe(end)
    package = logging.getLogger("normexp")
    package.addHandler(pipe)
    package.setLevel(logging.INFO)
    package.propagate = False
    logging.raiseExceptions = False  # a log on a full disk must not fill the screen as well
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        with importing_run_task(run_task) as trainer:
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            pipe.enqueue(TaskTaken(()))
            work(cells, board, slot, pipe.enqueue, StopRequest(), run_task=trainer, number=number)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


class Pipe(QueueHandler):
    """Sends events and log messages to the command."""

    def __init__(self, end: Connection) -> None:
        super().__init__(SimpleQueue())  # unused
        self._end = end

    def enqueue(self, record: Event) -> None:
        with suppress(OSError):  # the command is gone, and its worker ends soon
            self._end.send(record)


def _stop_with_parent() -> None:
    """Once the parent has died, asks this process to stop, as the parent would have done."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
