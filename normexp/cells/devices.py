"""Trains a stack on several devices, with a process for each; only rank 0, the first, writes.

Lightning starts the processes (`ddp_spawn`), unless srun or torchrun has started them already.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import connection, parent_process
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from torch import Tensor, distributed, multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from normexp.cells.cell import prepare_cell
from normexp.cells.recipe import devices_of
from normexp.cells.stack import Stack, follow_stack, restore_stack, train_stack
from normexp.checks.preflight import Traits
from normexp.config.process import rank_among
from normexp.config.spec import CellSpec, one_line
from normexp.errors import INTERRUPTED, USER_MISTAKE, UserError
from normexp.records.logs import messages_to_stderr
from normexp.records.stacks import StackRecord
from normexp.training.devices import Devices
from normexp.training.fit import quiet_lightning
from normexp.training.stopping import Interrupted, StopRequest, TrainingControl

TICK = 0.1  # seconds between polls of other processes


class RankDied(Exception):
    """A process of a training was killed, or ended without a reason."""


class RankFailed(RuntimeError):
    """A process of a training raised an error."""


@dataclass(frozen=True)
class RankJob:
    """A stack for all ranks to train, as plain values from which each rank builds its objects."""

    spec: CellSpec  # of the first cell of the stack
    devices: Devices
    record: StackRecord
    traits: Traits  # of that cell, which only the first process has probed
    messages: Sequence[str]  # logged while it was prepared there

    def train(self, rank: int, control: TrainingControl) -> None:
        """Trains as this rank. Raises Interrupted in all ranks alike."""
        if rank == 0:
            with messages_to_stderr(known=self.messages):
                train_stack(self._build_stack(), control)
        else:
            with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
                follow_stack(self._build_stack(), control.stop)

    def _build_stack(self) -> Stack:
        cell = prepare_cell(self.spec, traits=self.traits)
        return restore_stack(self.record, [replace(cell, messages=self.messages)])


def train_on_devices(stack: Stack, control: TrainingControl) -> None:
    """Trains a stack as `train_stack` does, on as many devices as its cell has.

    Raises:
        RankDied: a process was killed. The checkpoint stays, and one process can resume it too.
        RankFailed: a process raised an error.
        Interrupted: as in `train_stack`.
    """
    cell = stack.cell
    devices = cell.recipe.devices
    if devices.count == 1:
        train_stack(stack, control)
        return
    job = RankJob(cell.spec, devices, stack.record, cell.traits, list(cell.messages))
    if rank_among(devices.count) is None:
        with control.stop.listening():
            _spawn_ranks(job, control)
    else:
        with started_ranks(devices).training(job):
            train_stack(stack, control)


def _disconnect_at_exit() -> None:
    """Ends the threads of this process's connection before Python ends.

    Lightning does so for NCCL alone. A thread of Gloo that drops a tensor while Python ends aborts
    the process.
    """

    def disconnect() -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    atexit.register(disconnect)


# --- processes that Lightning starts --------------------------------------------------------------

# What the memory that this process shares with its ranks holds: a request and their progress.
STOP, STEP, NUM_STEPS = range(3)


def _spawn_ranks(job: RankJob, control: TrainingControl) -> None:
    stop, on_steps = control.stop, control.on_steps
    shared = torch.zeros(3, dtype=torch.int64).share_memory_()
    errors = multiprocessing.get_context("spawn").SimpleQueue()
    with quiet_lightning():
        fabric = Fabric(
            accelerator=job.devices.type,
            devices=job.devices.per_node,
            strategy="ddp_spawn",
            plugins=[LightningEnvironment()],  # even inside a SLURM job
        )
    run_rank = partial(_run_rank, job=job, shared=shared, errors=errors, shows_bar=on_steps is None)
    with ThreadPoolExecutor(1) as pool:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        ended = pool.submit(fabric.launch, run_rank)  # ranks unblock it once they handle it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while not wait([ended], TICK).done:
            shared[STOP] = stop.requested
            if on_steps is not None and shared[NUM_STEPS]:
                on_steps(int(shared[STEP]), int(shared[NUM_STEPS]))
    try:
        is_interrupted = ended.result()
    except ProcessExitedException as error:
        if stop.requested:
            raise Interrupted from error
        raise RankDied(f"{error}; the same command continues from the checkpoint") from None
    except ProcessRaisedException as error:
        if errors.empty():  # a rank failed before training
            raise
        raise errors.get() from error  # the first one; other ranks may have lost their peer
    if is_interrupted:
        raise Interrupted


def _run_rank(
    fabric: Fabric, *, job: RankJob, shared: Tensor, errors: Any, shows_bar: bool
) -> bool:
    """Trains as one rank; returns True if it was interrupted."""

    def show(step: int, num_steps: int) -> None:
        shared[STEP], shared[NUM_STEPS] = step, num_steps

    _disconnect_at_exit()
    stop = StopRequest()
    with _watching_parent(shared, stop), stop.listening():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            job.train(fabric.global_rank, TrainingControl(stop, None if shows_bar else show))
        except Interrupted:
            return True
        except Exception as error:
            sent = error
            if not isinstance(error, UserError | OSError):  # others may not survive a pickle
                sent = RankFailed(f"process {fabric.global_rank}: {one_line(error)}")
            sent.add_note(traceback.format_exc())
            errors.put(sent)
            raise
    return False


@contextmanager
def _watching_parent(shared: Tensor, stop: StopRequest) -> Iterator[None]:
    """Passes on the parent's stop requests; exits if the parent, which holds the lock, dies.

    The thread ends with the block: a thread inside torch would abort a process that exits.
    """
    parent, is_over = parent_process(), threading.Event()
    assert parent is not None

    def watch() -> None:
        while not is_over.is_set():
            if connection.wait([parent.sentinel], TICK):
                os._exit(1)
            if shared[STOP]:
                stop.requested = True

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# --- processes that srun or torchrun has started --------------------------------------------------


class StartedRanks:
    """The processes that were started for one command: rank 0 decides what all of them train.

    Only rank 0 reads the records, so ranks cannot disagree about what is missing.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.are_waiting = True  # for a job, while this process is rank 0

    @contextmanager
    def training(self, job: RankJob) -> Iterator[None]:
        """Makes the other ranks train a job, which rank 0 trains inside the block."""
        if not self.are_waiting:
            raise RankDied("the other processes have ended; the same command continues")
        self.fabric.broadcast(job)
        self.are_waiting = False
        yield
        self.are_waiting = True

    def dismiss(self) -> None:
        """Ends `follow` in the other ranks, unless a failure or a stop has ended it already."""
        if self.are_waiting:
            self.fabric.broadcast(None)

    def follow(self) -> None:
        """Trains the jobs that rank 0 sends until its command ends. Raises Interrupted with it."""
        while (job := self.fabric.broadcast(None)) is not None:
            job.train(self.fabric.global_rank, TrainingControl())


@cache  # one connection per process
def started_ranks(devices: Devices) -> StartedRanks:
    """Connects to all processes that were started for a cell; waits for them."""
    by_srun = "RANK" not in os.environ
    environment = SLURMEnvironment(auto_requeue=False) if by_srun else LightningEnvironment()
    with quiet_lightning():
        fabric = Fabric(
            accelerator=devices.type,
            devices=devices.per_node,
            num_nodes=devices.num_nodes,
            strategy="ddp",
            plugins=[environment],
        )
        fabric.launch()
    _disconnect_at_exit()
    ranks = {"LOCAL_RANK": fabric.local_rank, "NODE_RANK": fabric.node_rank}  # for the Trainer
    os.environ.update({name: str(rank) for name, rank in ranks.items()})
    return StartedRanks(fabric)


def run_as_rank(cells: Sequence[CellSpec], rank: int, train: Callable[[], int]) -> int:
    """Trains one cell as one of several processes; returns the exit code.

    Args:
        rank: of this process. Rank 0 calls `train`; the others follow it.

    Raises:
        UserError: several cells. Only rank 0 raises it.
    """
    cell = cells[0]
    if len(cells) > 1 or cell.config is None:
        if rank > 0:
            return USER_MISTAKE
        raise UserError(
            f"{len(cells)} cells in one srun or torchrun: start one cell each, or drop srun; "
            "trainer=ddp starts its processes itself"
        )
    if cell.config["dry_run"]:
        return 0 if rank > 0 else train()
    ranks = started_ranks(devices_of(cell))
    if rank > 0:
        try:
            ranks.follow()
        except Interrupted:
            return INTERRUPTED
        return 0
    try:
        return train()
    finally:
        ranks.dismiss()
