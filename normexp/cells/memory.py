"""What a training needs at least of a machine's memory, before it begins."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from omegaconf import DictConfig

from normexp.batching.replicas import stacks
from normexp.errors import UserError
from normexp.training.fit import device_type

COPIES = 3  # of each parameter: its value, its gradient and a state of the optimizer
GIB = 2**30


def check_memory(cfg: DictConfig, num_parameters: int, elements_per_forward: int) -> None:
    """Raises UserError for a training that needs more memory than the device has.

    Args:
        num_parameters: of one network.
        elements_per_forward: values that reach all sites of one replica in one forward.
    """
    device = device_type(cfg.trainer.accelerator)
    size = 8 if cfg.trainer.precision == "64-true" else 4
    at_once = cfg.replicas if stacks(device, cfg.replicas, elements_per_forward) else 1
    if cfg.stack is False:
        at_once = 1
    needed = size * (COPIES * num_parameters * cfg.replicas + 2 * elements_per_forward * at_once)
    available = memory_of(device)
    if needed > available:
        fits = int(float(f"{0.9 * cfg.replicas * available / needed:.0e}"))
        remedy = f"replicas={fits}" if fits else "a smaller model, or micro_batch_size=..."
        raise UserError(
            f"replicas={cfg.replicas} at micro_batch_size={cfg.micro_batch_size or cfg.batch_size} "
            f"need at least {needed / GIB:.1f} GiB of memory, and this machine has "
            f"{available / GIB:.1f}; try {remedy}"
        )


def memory_of(device: str) -> int:
    """Bytes of memory that a device has, used or not."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" for none
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(installed, int(text)) if text.isdecimal() else installed
