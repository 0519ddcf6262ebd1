"""A training on several devices, with a process for each, that torchrun or srun has started.

Rank 0, the first, reads and writes the records and says what all of them train.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from torch import distributed

from normexp.config.keys import TrainerKeys
from normexp.config.spec import CellSpec
from normexp.errors import INTERRUPTED, Halted
from normexp.training.devices import device_type
from normexp.training.fit import quiet_lightning
from normexp.training.stopping import Interrupted

Follow = Callable[..., None]  # trains along, from the arguments that rank 0 sends
_ranks: Ranks | None = None  # the processes of this one's training, once they are connected


class Ranks:
    """The connected processes of a command."""

    def __init__(self, keys: TrainerKeys) -> None:
        by_srun = "RANK" not in os.environ
        environment = SLURMEnvironment(auto_requeue=False) if by_srun else LightningEnvironment()
        with quiet_lightning():
            self.fabric = Fabric(
                accelerator=device_type(keys.accelerator),
                devices=keys.devices,
                num_nodes=keys.num_nodes,
                strategy="ddp",
                plugins=[environment],
            )
            self.fabric.launch()
        # Else a thread of Gloo that drops a tensor while Python ends aborts the process.
        atexit.register(
            lambda: distributed.is_initialized() and distributed.destroy_process_group()
        )
        ranks = {"LOCAL_RANK": self.fabric.local_rank, "NODE_RANK": self.fabric.node_rank}
        os.environ.update({name: str(rank) for name, rank in ranks.items()})  # for the Trainer
        self.are_waiting = True  # for a stack, while this process is rank 0

    def follow(self, train: Follow) -> None:
        """Trains the stacks that rank 0 sends until its command ends."""
        with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
            nothing: Any = None  # else the type of what is received
            while (job := self.fabric.broadcast(nothing)) is not None:
                train(*job)


@contextmanager
def training_together(job: tuple[Any, ...]) -> Iterator[None]:
    """Makes the other processes, if there are any, train what this one trains inside the block.

    Raises:
        Halted: they have ended, as after an error.
    """
    if _ranks is None:
        yield
        return
    if not _ranks.are_waiting:
        raise Halted("the other processes have ended; the same command continues")
    _ranks.fabric.broadcast(job)
    _ranks.are_waiting = False
    yield
    _ranks.are_waiting = True


def run_as_rank(
    cells: Sequence[CellSpec], rank: int, train: Callable[[], int], follow: Follow
) -> int:
    """Trains one cell as one of several processes; returns the exit code.

    Args:
        rank: of this process. Rank 0 calls `train`; the others `follow` it.
    """
    global _ranks
    _ranks = Ranks(cells[0].settings.trainer)
    if rank > 0:
        try:
            _ranks.follow(follow)
        except Interrupted:
            return INTERRUPTED
        return 0
    try:
        return train()
    finally:
        if _ranks.are_waiting:  # else a failure or a stop has ended them
            _ranks.fabric.broadcast(None)
