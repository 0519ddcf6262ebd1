"""A worker: walks the stacks of a command, takes the first that is free, trains it, commits it.

Workers of this command, of another terminal and of a launcher's job do the same. The files of the
study tell them which runs lack a result.
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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

from normexp.errors import FAILED, INTERRUPTED, Halted, UserError, one_line
from normexp.training.cells.stack import Stack, cut_stacks
from normexp.training.config.spec import CellSpec
from normexp.training.records.files import describe
from normexp.training.records.journal import CommandEntry, refused_by
from normexp.training.records.locks import other_holders
from normexp.training.records.logs import messages_to_stderr
from normexp.training.records.stack_state import lock_of, read_stacks
from normexp.training.records.study import CellState, read_cell
from normexp.training.stopping import Interrupted, StopRequest, TrainingControl
from normexp.training.sweeps.machine import WorkerSlot, importing_torch

logger = logging.getLogger(__name__)

SPAWN = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks
TICK = 0.2  # seconds between two walks that found nothing free
GPU_WAITS = "add workers=0 to train at once; this waits until another command ends: %s"
RUNS_WAIT = "waiting for what others train: %s"


@dataclass(frozen=True)
class Job:
    """What a command asks of its workers.

    Attributes:
        cells: of one study, whose journal has a line for each refused cell.
        command: the line of the command in that journal.
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

    def unfinished(self) -> list[Stack]:
        """The stacks with runs that lack a result, in order."""
        refused = refused_by(self.study_dir, self.command.id)
        stacks = []
        for stack in self.stacks:
            if stack.left(refused):  # the folder of an ended stack need not be read
                stacks += [part for part in stack.parts() if part.left(refused)]
        return stacks

    def states(self) -> list[CellState]:
        """The state of each cell, over the runs that the command asks for."""
        study_dir, stacks = self.study_dir, read_stacks(self.study_dir)
        refused = refused_by(study_dir, self.command.id)
        states = []
        for cell in self.cells:
            error = refused.get(cell.id, "")
            states.append(read_cell(study_dir, cell.id, cell.request, stacks, error))
        return states


def work(job: Job, slot: WorkerSlot, control: TrainingControl) -> None:
    """Trains stacks until none is unfinished, or a stop is requested.

    Raises:
        Halted: nothing more can be trained in this process.
    """
    from normexp.training.cells.cell import Prepared  # torch
    from normexp.training.cells.run import train_stack

    prepared = Prepared()
    while not control.stop.requested and (stacks := job.unfinished()):
        with slot.claim() as has_slot:
            try:
                was_free = has_slot and any(
                    train_stack(stack, job.command, control, prepared) for stack in stacks
                )
            except Interrupted:
                return
            except UserError as error:  # a record that cannot be read or written
                raise Halted(str(error)) from error
        control.on_steps()
        if not was_free:
            _say_who_trains(stacks, None if has_slot else slot)
            time.sleep(TICK)


def _say_who_trains(stacks: Sequence[Stack], slot: WorkerSlot | None) -> None:
    """Logs which commands hold the slot, if it is not free, or else the runs of all stacks.

    The same line is shown once.
    """
    if slot is not None:
        text, locks = GPU_WAITS, slot.paths()
    else:
        runs = [run for stack in stacks for run in stack.runs]
        text, locks = RUNS_WAIT, [lock_of(spec.directory, seed) for spec, seed in runs]
    if others := other_holders(locks):
        logger.info(text, "; ".join(dict.fromkeys(others)))


def import_training() -> None:
    """Imports torch and what trains."""
    warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, over attention
    with importing_torch():
        import normexp.training.cells.run  # noqa: F401


# --- Worker processes -----------------------------------------------------------------------------


class Worker:
    """One worker process, seen from its command.

    last_line: of those that it has printed or logged
    """

    def __init__(self, slot: WorkerSlot, job: Job) -> None:
        self.slot = slot
        self.last_line = ""
        self._num_bytes_read = 0
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
        num_new_bytes = os.fstat(descriptor).st_size - self._num_bytes_read
        text = os.pread(descriptor, num_new_bytes, self._num_bytes_read)
        if self.process.is_alive():
            text = text[: text.rfind(b"\n") + 1]  # the worker has not ended its last line
        self._num_bytes_read += len(text)
        lines = text.decode(errors="replace").splitlines()
        self.last_line = [self.last_line, *lines][-1]
        return lines

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
        with messages_to_stderr():
            import_training()
            work(job, slot, TrainingControl(stop))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Halted as error:
        reason = str(error)
    except OSError as error:
        reason = describe(error)
    except Exception as error:  # a fault of normexp, which another worker would meet too
        traceback.print_exc()
        reason = one_line(error)
    else:
        return
    print(reason, flush=True)
    sys.exit(FAILED)


def _stop_with_parent() -> None:
    """Once the parent has died, stops this process by the signal that the parent would send."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
