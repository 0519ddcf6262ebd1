"""One training on several devices, with a process for each, which torchrun or srun has started.

Rank 0 reads and writes the records, and tells the other processes what to train.
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

from normexp.errors import INTERRUPTED, Halted
from normexp.training.config.keys import TrainerKeys
from normexp.training.config.spec import CellSpec
from normexp.training.devices import device_type
from normexp.training.fit import quiet_lightning
from normexp.training.stopping import Interrupted, Together

Follow = Callable[..., None]  # trains along, from the arguments that rank 0 sends


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
        atexit.register(_leave_group)
        # The Trainer reads its ranks here.
        os.environ["LOCAL_RANK"] = str(self.fabric.local_rank)
        os.environ["NODE_RANK"] = str(self.fabric.node_rank)
        self.are_waiting = True  # for what rank 0 sends

    def follow(self, follow_stack: Follow) -> None:
        """Trains along the stacks that rank 0 sends, until its command ends."""
        with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
            nothing: Any = None  # without Any, pyright infers that None is received
            while (job := self.fabric.broadcast(nothing)) is not None:
                follow_stack(*job)

    @contextmanager
    def together(self, job: tuple[Any, ...]) -> Iterator[None]:
        """Makes the other processes train the stack that rank 0 trains inside the block.

        Raises:
            Halted: the other processes have ended, for example after an error.
        """
        if not self.are_waiting:
            raise Halted("the other processes have ended; the same command continues")
        self.fabric.broadcast(job)
        self.are_waiting = False
        yield
        self.are_waiting = True

    def close(self) -> None:
        """Ends the other processes, unless a failure or a stop has ended them."""
        if self.are_waiting:
            self.fabric.broadcast(None)


def _leave_group() -> None:
    """Without this, a Gloo thread that frees a tensor while Python exits aborts the process."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def run_as_rank(
    cells: Sequence[CellSpec], rank: int, train: Callable[[Together], int], follow: Follow
) -> int:
    """Trains one cell as one of several processes; returns the exit code.

    Args:
        rank: of this process. Rank 0 calls `train`; the others `follow` it.
    """
    ranks = Ranks(cells[0].settings.trainer)
    if rank > 0:
        try:
            ranks.follow(follow)
        except Interrupted:
            return INTERRUPTED
        return 0
    try:
        return train(ranks.together)
    finally:
        ranks.close()
