"""An optimizer step's gradient from several forward passes, as if it had been one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normexp.batching.replicas import Batch, Replicas
from normexp.batching.sizes import Bounds


def accumulate(
    replicas: Replicas,
    batch: Batch,
    bounds: Sequence[Bounds],
    num_samples: int,
    run: Callable[[Batch, int, int], Tensor],
) -> Tensor:
    """Runs the parts of a step that this process has; returns their loss per replica (S,).

    Each part starts from the buffers before the step, which ends with what `merge_buffers` makes of
    the parts' ends. A part's loss is divided by the whole step's targets and not by the number of
    parts, so that a short last part weighs what it holds.

    Args:
        batch: the samples of all parts.
        bounds: first and last index of each part, counted in the whole step.
        num_samples: samples of the whole step.
        run: `run(part, num_targets, first_sample)` adds a part's gradient and returns its losses.
    """
    targets = batch["targets"]  # (S, N, ...)
    num_targets = num_samples * targets.shape[2:].numel()
    if len(bounds) == 1:
        return run(batch, num_targets, bounds[0][0])
    start = replicas.read_buffers()
    losses, ends, lengths = [], [], [last - first for first, last in bounds]
    split = {name: value.split(lengths, dim=1) for name, value in batch.items()}
    for index, (first, _) in enumerate(bounds):
        part = {name: values[index] for name, values in split.items()}
        losses.append(run(part, num_targets, first))
        ends.append(replicas.read_buffers())
        replicas.write_buffers(start)
    if not losses:  # a device whose share of a short batch is empty
        dtype = next(replicas.parameters()).dtype
        return torch.zeros(replicas.num_replicas, dtype=dtype, device=targets.device)
    shares = [length / sum(lengths) for length in lengths]
    replicas.merge_buffers(start, ends, shares)
    return torch.stack(losses).sum(dim=0)
