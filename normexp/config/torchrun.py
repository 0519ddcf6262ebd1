"""The processes that torchrun or srun has started to train one cell on several devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from shlex import join

from normexp.config.spec import CellSpec
from normexp.errors import UserError

# Variables of torchrun and of srun: number of processes, index of this process, and a variable that
# only a started process has. (SLURM also sets the first two in a batch script.)
VARIABLES = (("WORLD_SIZE", "RANK", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"))


def started_processes() -> tuple[int, int]:
    """The rank of this process, and how many torchrun or srun has started; (0, 1) without them."""
    for size, index, proof in VARIABLES:
        if proof in os.environ and index in os.environ:
            return int(os.environ[index]), int(os.environ.get(size, 1))
    return 0, 1


def check_processes(cells: Sequence[CellSpec], words: Sequence[str]) -> int | None:
    """The rank of this process; None if it is alone.

    Raises:
        UserError: torchrun or srun has not started a process for each device of the only cell.
    """
    rank, started = started_processes()
    for trainer in (cell.config["trainer"] for cell in cells if not cell.error):
        devices, num_nodes = trainer["devices"], trainer["num_nodes"]
        if devices * num_nodes != started:
            remedy = f"type torchrun --nnodes {num_nodes} --nproc-per-node {devices} "
            raise UserError(
                f"trainer.devices={devices}, trainer.num_nodes={num_nodes}: needs as many "
                f"processes, and this command has {started}; "
                + (
                    f"{remedy}-m normexp.train {join(words[1:])}"
                    if devices * num_nodes > 1
                    else "drop torchrun or srun"
                )
            )
    if started > 1 and len(cells) > 1:
        raise UserError(f"{len(cells)} cells in one torchrun or srun: start one cell each")
    return rank if started > 1 else None
