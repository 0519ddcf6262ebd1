"""Who started this process: srun, torchrun, a W&B agent or the user. Does not import torch."""

from __future__ import annotations

import os

# Variables of torchrun and of srun: number of processes, index of this process, and a variable that
# only a started process has. (SLURM also sets the first two in a batch script.)
VARIABLES = (("WORLD_SIZE", "RANK", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"))


def place_among(num_processes: int) -> int | None:
    """Index of this process among `num_processes` started to train together; None if alone."""
    for size, index, proof in VARIABLES:
        is_started = os.environ.get(size) == str(num_processes) and proof in os.environ
        if num_processes > 1 and is_started and index in os.environ:
            return int(os.environ[index])
    return None


def is_under_agent() -> bool:
    """True if a W&B agent started this process."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))
