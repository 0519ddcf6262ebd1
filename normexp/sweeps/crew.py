"""The worker processes of a sweep: started, heard, asked to stop, and described when they die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from normexp.config.spec import CellSpec
from normexp.records.stacks import StackRecord
from normexp.sweeps.machine import Place
from normexp.sweeps.tasks import Board, Task
from normexp.sweeps.worker import Event, Trainer, main

SPAWN = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks


class Seat:
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


class Worker(Seat):
    """One worker process.

    Args:
        number: of it on the board, from 1; no other worker of the command has had it.
    """

    def __init__(
        self,
        number: int,
        place: Place,
        cells: Sequence[CellSpec],
        board: Board,
        run_task: Trainer | None = None,
    ) -> None:
        super().__init__()
        self.number = number
        self.place = place
        self._shown = 0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  as long as the worker
        self.connection, theirs = SPAWN.Pipe(duplex=False)
        # A connection is what multiprocessing hands over; its descriptor is what the worker takes.
        with theirs, Connection(os.dup(self._output.fileno()), readable=False) as output:
            arguments = (theirs, output, cells, board, place, number, run_task)
            self.process = SPAWN.Process(target=main, args=arguments)
            # It inherits that Ctrl-C is blocked, until it has left the terminal.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with place.environment():
                    self.process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def hear(self) -> Event | None:
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
