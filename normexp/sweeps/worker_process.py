"""The worker processes of a sweep, seen from the command and from inside."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from logging.handlers import QueueHandler
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue

from normexp.errors import INTERRUPTED
from normexp.records.logs import CellFilter
from normexp.sweeps.machine import WorkerSlot
from normexp.sweeps.walk import Walk
from normexp.sweeps.worker import (
    Event,
    WalkEnded,
    WorkerReady,
    WorkerState,
    ready_to_train,
    work,
)
from normexp.training.stopping import StopRequest

SPAWN = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks


class Worker(WorkerState):
    """One worker process."""

    def __init__(self, slot: WorkerSlot, walk: Walk) -> None:
        super().__init__()
        self.slot = slot
        self._shown = 0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the worker
        self.connection, theirs = SPAWN.Pipe(duplex=False)
        # A Connection, because multiprocessing can pass one; the worker uses only its descriptor.
        with theirs, Connection(os.dup(self._output.fileno()), readable=False) as output:
            arguments = (theirs, output, walk, slot)
            self.process = SPAWN.Process(target=main, args=arguments)
            # The child inherits this block, so that Ctrl-C cannot reach it while it starts. The
            # start of the tracker unblocks signals, so it must not happen with the first worker's.
            resource_tracker.ensure_running()
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with slot.environment():
                    self.process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def receive(self) -> Event | None:
        """The worker's next event; None once it has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return None

    def new_output(self) -> str:
        """The worker's output since the last call."""
        text = self._read(self._shown)
        self._shown += len(text)
        return text.decode(errors="replace")

    def last_output(self) -> str:
        """The end of the worker's output."""
        return self._read(0)[-4000:].decode(errors="replace")

    def _read(self, start: int) -> bytes:
        descriptor = self._output.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size - start, start)

    def describe_death(self) -> str:
        """Why the worker ended, in one line. It must have ended."""
        code = self.process.exitcode or 0
        if code < 0:
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"killed by signal {-code}, {signal.Signals(-code).name}{memory}"
        lines = [line.strip() for line in self.last_output().splitlines() if line.strip()]
        return f"its process ended with code {code}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        """Kills the worker if it has not ended."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()
        self._output.close()


# --- In the worker's process ----------------------------------------------------------------------


def main(end: Connection, output: Connection, walk: Walk, slot: WorkerSlot) -> None:
    """Runs `work` in this process. If the parent dies, stops, with a checkpoint if it trains.

    Args:
        end: the end of the pipe on which the command gets events and log messages.
        output: the file for everything printed; only its descriptor is used.
    """
    os.setsid()  # only the parent gets Ctrl-C, and passes it on as SIGTERM
    stop = StopRequest()
    signal.signal(signal.SIGTERM, stop.stop_at_once)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sender = EventSender(end)
    package = logging.getLogger("normexp")
    package.addHandler(sender)
    package.setLevel(logging.INFO)
    package.propagate = False
    logging.raiseExceptions = False  # a log on a full disk must not fill the screen as well
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        with ready_to_train():
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            sender.enqueue(WorkerReady())
            if work(walk, slot, sender.enqueue, stop):
                sender.enqueue(WalkEnded())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


class EventSender(QueueHandler):
    """Sends events and log messages to the command."""

    def __init__(self, end: Connection) -> None:
        super().__init__(SimpleQueue())  # unused
        self.addFilter(CellFilter())
        self._end = end

    def enqueue(self, record: Event) -> None:
        with suppress(OSError):  # the command has died, and this worker ends soon
            self._end.send(record)


def _stop_with_parent() -> None:
    """Once the parent has died, stops this process by the signal that the parent would send."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
