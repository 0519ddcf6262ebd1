"""Which of several processes this is, as whoever started them says. Knows no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normexp.studies.outcome import Composed

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


def is_follower(cells: Sequence[Composed]) -> bool:
    """Whether this process only helps another to train cells of several devices."""
    return any((place_of(cell) or 0) > 0 for cell in cells)


def place_of(cell: Composed) -> int | None:
    """Index of this process among those of a cell, or None."""
    if cell.cfg is None:
        return None
    devices, num_nodes = cell.cfg.trainer.devices, cell.cfg.trainer.num_nodes
    if not (isinstance(devices, int) and isinstance(num_nodes, int)):
        return None  # refused as the cell is validated
    return place_among(devices * num_nodes)


def environment_of(index: int, num_processes: int, port: int) -> dict[str, str]:
    """What tells a process its place on this machine, in torchrun's words."""
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
