"""An optimizer step's gradient from several forward passes, as if it had been one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normexp.batching.replicas import Batch, Replicas
from normexp.batching.sizes import Sizes


def accumulate(
    replicas: Replicas, batch: Batch, sizes: Sizes, run: Callable[[Batch, int, int], Tensor]
) -> Tensor:
    """Runs every part of a step's batch; returns the step's loss per replica (S,).

    Each part starts from the buffers before the step, which ends with what `merge_buffers` makes of
    the parts' ends. A part's loss is divided by the whole step's targets and not by the number of
    parts, so that a short last part weighs what it holds.

    Args:
        run: `run(part, num_targets, first_sample)` adds a part's gradient and returns its losses.
    """
    num_samples = batch["targets"].shape[1]  # (S, N, ...)
    num_targets = batch["targets"][0].numel()
    bounds = sizes.micro_bounds(num_samples)
    if len(bounds) == 1:
        return run(batch, num_targets, 0)
    start = replicas.read_buffers()
    losses, ends = [], []
    for first, last in bounds:
        part = {name: value[:, first:last] for name, value in batch.items()}
        losses.append(run(part, num_targets, first))
        ends.append(replicas.read_buffers())
        replicas.write_buffers(start)
    shares = [(last - first) / num_samples for first, last in bounds]
    replicas.merge_buffers(start, ends, shares)
    return torch.stack(losses).sum(dim=0)
