"""The worker processes of a sweep: started, heard, asked to stop, and described when they die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from normexp.config.spec import CellSpec
from normexp.records.stacks import StackRecord
from normexp.sweeps.machine import Place
from normexp.sweeps.tasks import Board, Task
from normexp.sweeps.worker import Event, Trainer, main

PATIENCE = 10.0  # seconds for a worker to end that has nothing left to do
SPAWN = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks


def shared_board(tasks: Sequence[Task], num_cells: int) -> Board:
    """A board in memory that workers share. Without a lock, which a killed one would keep."""
    return Board(tasks, SPAWN.RawArray("i", num_cells), SPAWN.RawArray("b", num_cells))


class Worker:
    """One worker process, and what it has told.

    Attributes:
        number: of it on the board, from 1; no other worker of the command has had it.
        task: the cells it has at the moment; none while it has none.
        stack: the last stack of its task that began to train.
        since: when it took its task.
    """

    def __init__(
        self,
        number: int,
        place: Place,
        cells: Sequence[CellSpec],
        board: Board,
        run_task: Trainer | None = None,
    ) -> None:
        self.number = number
        self.place = place
        self.is_ready = False
        self.task: Task = ()
        self.stack: StackRecord | None = None
        self.steps = (0, 0)
        self.since = time.monotonic()
        self._shown = 0
        descriptor, path = tempfile.mkstemp(prefix="normexp-worker-")
        self._output = descriptor
        self.connection, theirs = SPAWN.Pipe(duplex=False)
        arguments = (theirs, path, cells, board, place, number, run_task)
        self.process = SPAWN.Process(target=main, args=arguments, name=f"normexp-worker-{number}")
        with theirs, place.environment():
            _start_without_interrupts(self.process)
        self._path = Path(path)

    def take(self, task: Task) -> None:
        self.task, self.stack, self.steps = task, None, (0, 0)
        self.since = time.monotonic()

    def hear(self) -> Event | None:
        """Its next event; None once it has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return None

    def ask_to_stop(self) -> None:
        """It leaves a checkpoint if it trains, and ends."""
        self.process.terminate()

    def new_output(self) -> str:
        """What it has printed since this was last called."""
        size = os.fstat(self._output).st_size
        text = os.pread(self._output, size - self._shown, self._shown)
        self._shown = size
        return text.decode(errors="replace")

    def last_output(self) -> str:
        """The end of all that it has printed."""
        size = os.fstat(self._output).st_size
        return os.pread(self._output, 4000, max(0, size - 4000)).decode(errors="replace")

    def describe_death(self) -> str:
        """Why it ended, in one line; it has ended."""
        code = self.process.exitcode or 0
        if code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"killed by signal {-code}, {signal.Signals(-code).name}{memory}"
        lines = [line.strip() for line in self.last_output().splitlines() if line.strip()]
        return f"its process ended with code {code}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        """Waits for its end, which it is about to reach, or kills it."""
        self.process.join(PATIENCE)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()
        os.close(self._output)
        self._path.unlink(missing_ok=True)  # of one that died before it removed it


def _start_without_interrupts(process: BaseProcess) -> None:
    """Blocks Ctrl-C in a new process, which inherits that, until it has left the terminal."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def ready_workers(workers: Sequence[Worker], seconds: float) -> list[Worker]:
    """The workers that have something to tell, or have ended; waits for it for some seconds."""
    by_connection = {worker.connection: worker for worker in workers}
    return [by_connection[each] for each in wait(list(by_connection), seconds)]  # type: ignore[index]
