"""The processes of a sweep: each in a session of its own, warm, and replaced when it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from typing import Any

from normexp.config.spec import CellSpec, Outcome
from normexp.sweeps.grouping import Task
from normexp.sweeps.machine import Place
from normexp.sweeps.messages import Stop

PATIENCE = 10.0  # seconds for an idle worker to end


class Worker:
    """One process and what it is doing.

    Attributes:
        number: its place, from 0.
        task: indices of the cells that it has; none while it has none.
        begun: outcome of the cell of a task of one, once it trains.
    """

    module = "normexp.sweeps.worker"

    def __init__(self, number: int, place: Place) -> None:
        self.number = number
        self.place = place
        self.is_ready = False
        self.task: Task = ()
        self.begun: Outcome | None = None
        self.steps = (0, 0)
        self.since = time.monotonic()
        self.connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  as long as the worker, see close
        self._told = 0
        environment = place.environment(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the sweep's process, which asks to stop
            )

    def give(self, task: Task, cells: Sequence[CellSpec]) -> None:
        self.task, self.begun, self.steps = task, None, (0, 0)
        self.since = time.monotonic()
        self._send(tuple(cells))

    def take_back(self) -> None:
        """Its task has ended."""
        self.task, self.begun = (), None

    def ask_to_stop(self) -> None:
        self._send(Stop())

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it died; its connection says so to the one who waits
            self.connection.send(message)

    def read_output(self) -> str:
        """What it has printed since this was last called."""
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), size - self._told, self._told)
        self._told = size
        return text.decode(errors="replace")

    def last_output(self) -> str:
        """The end of all that it printed in its life."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")

    def last_words(self) -> str:
        """The last line of it."""
        lines = [line.strip() for line in self.last_output().splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def describe_death(self) -> str:
        """Why it ended, in one line; it has ended."""
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            memory = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"killed by signal {-code}, {name}{memory}"
        words = self.last_words()
        return f"its process ended with code {code}" + (f": {words}" if words else "")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def close(self, patience: float) -> None:
        """Ends it: politely, by closing the pipe, and after `patience` seconds by a signal."""
        self.connection.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()


class Pool:
    """The workers of a sweep, each in a place of its own.

    Args:
        places: what each worker gets of the machine.
        warm: idle workers of an earlier sweep, taken where their places are the same; those of this
            one are left there at its end. None: they end with it.
    """

    def __init__(
        self,
        places: Sequence[Place],
        warm: list[Worker] | None = None,
        new_worker: Callable[[int, Place], Worker] = Worker,
    ) -> None:
        self.workers: list[Worker] = []
        self._free = dict(enumerate(places))
        self._warm = warm
        self._new_worker = new_worker

    def idle(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.task and worker.is_alive]

    @property
    def has_room(self) -> bool:
        """Whether there is a place for one more worker."""
        return bool(self._free)

    def start(self) -> Worker:
        """A worker in a place that is free."""
        number = min(self._free)
        place = self._free.pop(number)
        fitting = [each for each in self._warm or [] if each.place == place and each.is_alive]
        if fitting:
            worker = fitting[0]
            worker.number = number
            assert self._warm is not None
            self._warm.remove(worker)
        else:
            worker = self._new_worker(number, place)
        self.workers.append(worker)
        return worker

    def dismiss(self, worker: Worker, patience: float) -> None:
        worker.close(patience)
        self.workers.remove(worker)
        self._free[worker.number] = worker.place

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def close(self, *, keep_warm: bool) -> None:
        """Ends the workers; with `keep_warm` only those that the next sweep cannot take."""
        if self._warm is not None and keep_warm:
            self._warm += [worker for worker in self.workers if worker.is_alive]
            self.workers = [worker for worker in self.workers if not worker.is_alive]
        close_all(self.workers)


def close_all(workers: Sequence[Worker]) -> None:
    """Ends idle workers: all are told before the first is waited for."""
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.close(PATIENCE)
