"""Trains a stack on as many devices as its cell has, one process for each."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from normexp.build import plain
from normexp.cells.assembly import OnSteps, fitting_replicas
from normexp.cells.cell import prepare_cell
from normexp.cells.device_processes import Order, run_processes
from normexp.cells.naming import GROUPS
from normexp.cells.peers import Peers, meet
from normexp.cells.stack import Stack, follow_stack, train_together
from normexp.config.place import place_among
from normexp.errors import INTERRUPTED
from normexp.training.stopping import Interrupted, StopRequest


def train_on_devices(
    stack: Stack,
    notes: Sequence[str] = (),
    stop: StopRequest | None = None,
    on_steps: OnSteps | None = None,
) -> None:
    """Trains a stack as `train_together` does, with a process for each device of its cell.

    If srun or torchrun has started the processes, this is the first of them; otherwise starts
    them and waits for them. Only the first process writes.

    Raises:
        ProcessFailed: one of the processes that were started here failed, or died.
        Interrupted: as in `train_together`; or the other processes cannot go on.
    """
    cell, seeds = stack.cell, stack.seeds
    if cell.num_devices == 1:
        train_together(stack, notes, stop, on_steps)
        return
    # Sets aside a checkpoint that does not fit, before two processes read it.
    fitting_replicas(cell, seeds, stack.checkpoint)
    order = Order(
        cfg=plain(cell.cfg),
        choices={group: cell.record[group] for group in GROUPS},
        seeds=seeds,
        notes=list(notes),
        shows_progress=on_steps is None,
    )
    place = place_among(cell.num_devices)
    if place is not None:
        peers = meet(place, cell.num_devices)
        peers.tell(order)
        with peers.training():
            train_together(stack, notes, stop, on_steps)
        return
    stop = stop or StopRequest()
    with stop.listening():
        run_processes(order, cell.num_devices, stop, on_steps)


def follow(peers: Peers) -> int:
    """Trains the first process's stacks until its command ends; returns the exit code.

    Prints nothing: the first process reports refusals and results.
    """
    try:
        while (order := peers.hear()) is not None:
            try:
                with peers.training():
                    cell = prepare_cell(OmegaConf.create(order.cfg), order.choices)
                    follow_stack(cell, order.seeds)
            except Interrupted:
                return INTERRUPTED
            except Exception:
                if peers.is_apart:
                    raise
        return 0
    finally:
        peers.leave()
