"""A worker: walks the stacks of a command, takes the first that is free, trains it, commits it.

Workers of this command, of another terminal and of a launcher's job do the same, and learn from the
files of the study what is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from normexp.cells.stack import Stack, cut_stacks
from normexp.config.spec import CellSpec
from normexp.config.words import one_line
from normexp.errors import FAILED, INTERRUPTED, Halted, UserError
from normexp.records.files import describe, other_holders
from normexp.records.logs import messages_to_stderr
from normexp.records.study import (
    CellState,
    CommandEntry,
    lock_of,
    read_cell,
    read_stacks,
    refused_by,
)
from normexp.sweeps.machine import WorkerSlot, importing_torch
from normexp.training.stopping import Interrupted, StopRequest, TrainingControl

if TYPE_CHECKING:
    from normexp.cells.cell import Cell

logger = logging.getLogger(__name__)

SPAWN = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks
TICK = 0.2  # seconds between two walks that found nothing free
GPU_WAITS = "add workers=0 to train at once; this waits until another command ends: %s"
RUNS_WAIT = "waiting for what others train: %s"


@dataclass(frozen=True)
class Job:
    """What a command asks of its workers.

    Attributes:
        cells: of one study; a refused one has a line in it.
        command: its line in the study.
    """

    cells: Sequence[CellSpec]
    command: CommandEntry
    on_gpu: bool = False

    @cached_property
    def stacks(self) -> list[Stack]:
        return cut_stacks(self.cells, on_gpu=self.on_gpu)

    @property
    def study_dir(self) -> Path:
        return self.cells[0].study_dir

    def left(self) -> list[Stack]:
        """The stacks with runs that lack a result, in order."""
        refused = refused_by(self.study_dir, self.command.id)
        return [
            part
            for stack in self.stacks
            if stack.left(refused)
            for part in stack.parts()
            if part.left(refused)
        ]

    def states(self) -> list[CellState]:
        """The state of each cell, of the runs that the command asks for."""
        refused, stacks = refused_by(self.study_dir, self.command.id), read_stacks(self.study_dir)
        return [
            read_cell(
                *(self.study_dir, cell.id, cell.title, cell.seeds, stacks),
                refused=refused.get(cell.id, ""),
            )
            for cell in self.cells
        ]


def work(job: Job, slot: WorkerSlot, control: TrainingControl) -> None:
    """Walks until nothing is left, or a stop is requested.

    Raises:
        Halted: nothing more can be trained in this process.
    """
    from normexp.cells.run import train_stack

    cells: dict[str, Cell] = {}
    while not control.stop.requested and (left := job.left()):
        with slot.claim() as is_free:
            try:  # the first that no other process trains
                has_trained = is_free and any(
                    train_stack(stack, job.command, control, cells) for stack in left
                )
            except Interrupted:
                return
            except UserError as error:  # a record that cannot be read or written
                raise Halted(str(error)) from error
        control.on_steps()
        if has_trained:
            continue
        runs = [run for stack in left for run in stack.runs]
        locks = [lock_of(spec.directory, seed) for spec, seed in runs] if is_free else slot.paths()
        if others := other_holders(locks):  # the same line is shown once
            logger.info(RUNS_WAIT if is_free else GPU_WAITS, "; ".join(dict.fromkeys(others)))
        time.sleep(TICK)


@contextmanager
def ready_to_train() -> Iterator[None]:
    """Imports torch and what trains; caches data sets inside the block."""
    warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, over attention
    with importing_torch():
        import normexp.cells.run  # noqa: F401
        from normexp.data.build import keeping_data

    with keeping_data():
        yield


# --- Worker processes -----------------------------------------------------------------------------


class Worker:
    """One worker process, seen from its command."""

    def __init__(self, slot: WorkerSlot, job: Job) -> None:
        self.slot = slot
        self._shown = 0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the worker
        # A Connection, because multiprocessing can pass one; the worker uses only its descriptor.
        with Connection(os.dup(self._output.fileno()), readable=False) as output:
            self.process = SPAWN.Process(target=main, args=(output, job, slot))
            # The child inherits this block, so that Ctrl-C cannot reach it while it starts. The
            # start of the tracker unblocks signals, so it must not happen with the first worker's.
            resource_tracker.ensure_running()
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self.process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def new_output(self) -> list[str]:
        """The lines that the worker has printed or logged since the last call."""
        descriptor = self._output.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size - self._shown, self._shown)
        if self.process.is_alive():
            text = text[: text.rfind(b"\n") + 1]
        self._shown += len(text)
        return text.decode(errors="replace").splitlines()

    def close(self) -> None:
        """Kills the worker if it has not ended."""
        self.process.kill()
        self.process.join()
        self._output.close()


def main(output: Connection, job: Job, slot: WorkerSlot) -> None:
    """Runs `work` in this process. If the parent dies, stops, with a checkpoint if it trains.

    The last line of a worker that fails is why no other could go on.

    Args:
        output: the file for everything printed and logged; only its descriptor is used.
    """
    os.setsid()  # only the parent gets Ctrl-C, and passes it on as SIGTERM
    stop = StopRequest()
    signal.signal(signal.SIGTERM, stop.stop_at_once)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    logging.raiseExceptions = False  # a log on a full disk must not fill the screen as well
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    slot.hide_other_gpus()
    try:
        with messages_to_stderr(), ready_to_train():
            work(job, slot, TrainingControl(stop))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # but Halted, a fault of ours, which another worker would meet too
        reason = describe(error) if isinstance(error, OSError) else one_line(error)
        if not isinstance(error, Halted | OSError):
            traceback.print_exc()
        print(error if isinstance(error, Halted) else reason, flush=True)
        sys.exit(FAILED)


def _stop_with_parent() -> None:
    """Once the parent has died, stops this process by the signal that the parent would send."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
