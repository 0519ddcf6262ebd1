"""Which of several processes this is, as whoever started them says. Knows no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normexp.config.spec import CellSpec

# Number and index of processes, as torchrun and as srun tell them. A batch script, too, is told of
# its job's tasks; SLURM_STEP_ID says that srun has started them.
TOLD_BY = (("WORLD_SIZE", "RANK", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"))


def place_among(num_processes: int) -> int | None:
    """Index of this process among `num_processes` that were started to train together, or None."""
    for size, index, proof in TOLD_BY:
        told = os.environ.get(size) == str(num_processes) and proof in os.environ
        if num_processes > 1 and told and index in os.environ:
            return int(os.environ[index])
    return None


def place_of_command(cells: Sequence[CellSpec]) -> tuple[int, int] | None:
    """Index of this process among those that were started to train these cells, and their number.

    None where it is alone.
    """
    cfgs = [cell.cfg for cell in cells if cell.cfg is not None]
    for cfg in cfgs:
        devices, num_nodes = cfg.trainer.devices, cfg.trainer.num_nodes
        if not (isinstance(devices, int) and isinstance(num_nodes, int)):
            continue  # refused as the cell is validated
        index = place_among(devices * num_nodes)
        if index is not None:
            return index, devices * num_nodes
    return None


def environment_of(index: int, num_processes: int, port: int) -> dict[str, str]:
    """What tells a process its place on this machine, in torchrun's words.

    Args:
        port: of a TCPStore of the caller's, in which the processes meet.
    """
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # none of them starts one of its own
    }


def is_under_agent() -> bool:
    """Whether a W&B agent has started this process."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))
