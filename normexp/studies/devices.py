"""Training a cell on several devices: one process each, started here or by srun or torchrun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import OmegaConf

from normexp.batching.stacking import suitable_threads
from normexp.records.layout import CHECKPOINT_FILE, RESULT_FILE, seed_dir, stack_dir
from normexp.records.reader import read_result
from normexp.records.result import Result
from normexp.studies.assembly import build_callbacks, build_task
from normexp.studies.cell import Cell, prepare_cell
from normexp.studies.device_processes import Order, run_processes
from normexp.studies.entry import INTERRUPTED
from normexp.studies.naming import GROUPS, plain
from normexp.studies.peers import Peers, meet
from normexp.studies.place import place_among
from normexp.studies.resuming import fitting_replicas, resumed_replicas
from normexp.studies.stack import train_stack
from normexp.tasks.evaluation import StatisticsEvaluation
from normexp.tasks.fit import fit
from normexp.tasks.pruning import Pruned
from normexp.tasks.recorder import Recorder
from normexp.tasks.stopping import Interrupted, StopRequest

OnSteps = Callable[[int, int], None]


def train_on_devices(
    cell: Cell,
    seeds: list[int],
    notes: Sequence[str] = (),
    stop: StopRequest | None = None,
    on_steps: OnSteps | None = None,
) -> list[Result]:
    """As `train_stack`, by as many processes as the cell has devices.

    Where these have been started already, this is the first of them; else they are started here,
    and this process waits for them. Only the first one writes. No result of a run that was ended
    early.

    Raises:
        ProcessFailed: one of the processes that were started here failed, or died.
        Interrupted: as in `train_stack`; or the other processes cannot go on.
    """
    if cell.num_devices == 1:
        return train_stack(cell, seeds, notes, stop, on_steps)
    # Sets aside one that does not fit, before two processes look at it.
    fitting_replicas(cell, seeds, _checkpoint(cell, seeds))
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
            return train_stack(cell, seeds, notes, stop, on_steps)
    stop = stop or StopRequest()
    with stop.listening():
        run_processes(order, cell.num_devices, stop, on_steps)
    paths = [seed_dir(cell.directory, seed) / RESULT_FILE for seed in seeds]
    return [read_result(path) for path in paths if path.is_file()]


def follow_stack(cell: Cell, seeds: list[int], stop: StopRequest | None = None) -> None:
    """What every process but the first does of `train_stack`: the same, and writes nothing."""
    checkpoint = _checkpoint(cell, seeds)
    with suitable_threads(cell.elements_per_forward):
        replicas = resumed_replicas(cell, seeds, checkpoint)
        task = build_task(cell, seeds, replicas, Recorder([[] for _ in seeds]))
        with suppress(Pruned):  # in all processes at once; the first one tells
            fit(
                task,
                checkpoint=checkpoint,
                epochs=cell.plan.epochs,
                val_every_epochs=cell.cfg.val_every_epochs,
                trainer_options=plain(cell.cfg.trainer),
                loggers=[],
                callbacks=[
                    *build_callbacks(cell, on_steps=lambda *_: None),
                    StatisticsEvaluation(cell.evaluation),
                ],
                stop=stop,
            )


def follow(peers: Peers) -> int:
    """What every process but the first does of a command; returns its exit code.

    It says nothing: what is refused or recorded, the first one tells.
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


def _checkpoint(cell: Cell, seeds: list[int]) -> Path:
    return stack_dir(cell.directory, seeds[0], seeds[-1]) / CHECKPOINT_FILE
