"""Starts a process for each device of a cell, and waits for them: one fails, all end."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented

from normexp.config.place import environment_of
from normexp.errors import UserError
from normexp.training.stopping import Interrupted, StopRequest

GRACE_SECONDS = 3.0  # in which a failure's echoes in other processes tell theirs
STOPPED = 130


class ProcessFailed(Exception):
    """A process of a training on several devices failed."""


@dataclass(frozen=True)
class Order:
    """What the processes are to train: plain values."""

    cfg: dict[str, Any]
    choices: dict[str, str]
    seeds: list[int]
    notes: list[str]
    shows_progress: bool  # on stderr, by the first process


class DeviceProcess:
    """One process; it ends when this one does, as its stdin then closes."""

    def __init__(self, index: int, count: int, port: int, on_steps: Callable[[int, int], None]):
        self.index = index
        self.report: dict[str, Any] | None = None  # its last words
        self._on_steps = on_steps
        threads = str(max(1, (os.cpu_count() or 1) // count))
        environment = {
            "OMP_NUM_THREADS": threads,  # the CPU is shared by them all
            **os.environ,
            **environment_of(index, count, port),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "normexp.cells.device_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches this process, which hands it on once
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def send(self, order: Order) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(asdict(order), self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; its exit code says so

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:  # it was killed within a line; its exit code says so
                continue
            if "step" in message:
                self._on_steps(message["step"], message["num_steps"])
            else:
                self.report = message

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0, STOPPED)

    def ask_to_stop(self) -> None:
        if self.code is None:
            self._process.terminate()

    def end(self) -> None:
        """Kills it where it runs still, and lets go of its pipes."""
        if self.code is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def run_processes(
    order: Order,
    count: int,
    stop: StopRequest,
    on_steps: Callable[[int, int], None] | None = None,
) -> None:
    """Has `order` trained by `count` processes on this machine.

    Raises:
        UserError: what a process found wrong with the order.
        Interrupted: a stop was requested, and they left a checkpoint.
        ProcessFailed: with the reason of the process that failed first.
    """
    # Where they meet: on a port that the system picks, and held from now on.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    silent = on_steps or (lambda *_: None)
    processes: list[DeviceProcess] = []
    try:
        for index in range(count):
            processes.append(DeviceProcess(index, count, store.port, silent))
        for process in processes:
            process.send(order)
        _wait(processes, stop)
        failed = [process for process in processes if process.failed]
    finally:
        for process in processes:
            process.end()
    if stop.requested and all(process.code == -signal.SIGTERM for process in failed):
        failed = []  # asked before they listened
    if failed:
        raise _reason_of(failed, count)
    if stop.requested or any(process.code == STOPPED for process in processes):
        raise Interrupted


def _wait(processes: list[DeviceProcess], stop: StopRequest) -> None:
    """Until all have ended, or one has failed and its peers had time to notice."""
    told, deadline = False, None
    while any(process.code is None for process in processes):
        if stop.requested and not told:
            told = True
            for process in processes:
                process.ask_to_stop()
        if deadline is None and any(process.failed for process in processes):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _reason_of(failed: list[DeviceProcess], count: int) -> Exception:
    """The cause: a process that died without a word, else the first that spoke."""
    silent = [process for process in failed if process.report is None]
    first = min(silent or failed, key=lambda process: (process.report or {}).get("time", 0.0))
    if first.report is None:
        code = first.code or 0
        died = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return ProcessFailed(f"process {first.index} of {count} {died}")
    if first.report["kind"] == "mistake":
        return UserError(first.report["text"])
    error = ProcessFailed(f"process {first.index} of {count}: {first.report['text']}")
    error.add_note(first.report["traceback"])
    return error
