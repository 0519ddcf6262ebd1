"""The gradient of an optimizer step: its forward passes, their draws, several processes' shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normexp.batching.draws import derive_seed
from normexp.batching.processes import Processes
from normexp.batching.replicas import Batch, Measure, Replicas, dropouts
from normexp.batching.sizes import WHOLE, Bounds, Share, Sizes
from normexp.data.batches import TrainingBatches


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


class StepGradient:
    """Leaves a step's gradient in the replicas, of this process's samples and its peers'.

    Args:
        batches: where a step's samples come from; told which of them are this process's.
        run: `replicas.add_gradient`, or its compiled form.
        loss: a replica's loss of an output, summed over targets, as `{"loss": ...}`.
        processes: those that train together; None for one alone.
    """

    def __init__(
        self,
        replicas: Replicas,
        batches: TrainingBatches,
        sizes: Sizes,
        run: Callable[[Batch, Measure, float], Tensor],
        loss: Measure,
        processes: Processes | None,
    ) -> None:
        self.replicas = replicas
        self.batches = batches
        self.sizes = sizes
        self.run = run
        self.loss = loss
        self.processes = processes
        self.share = processes.share if processes else WHOLE
        self._num_dropouts = len(dropouts(replicas.trees[0]))
        if processes:
            batches.own_samples = self._own_samples

    def add(self, batch: Batch, step: int) -> Tensor:
        """Adds the gradient of `step`, counted from 0, and moves buffers; its losses (S,).

        Losses and gradient are means over the whole step's targets.
        """
        num_samples = self.batches.num_samples_of(step)
        start = self.replicas.read_buffers() if self.processes else []

        def run_part(part: Batch, num_targets: int, first_sample: int) -> Tensor:
            self._hand_in_draws(step, first_sample)
            return self._add_part(part, num_targets)

        bounds = self.sizes.micro_bounds(num_samples, self.share)
        losses = accumulate(self.replicas, batch, bounds, num_samples, run_part)
        if self.processes is None:
            return losses
        shares = [Share(index, self.share.count) for index in range(self.share.count)]
        taken = [_count(self.sizes.micro_bounds(num_samples, share)) for share in shares]
        self.processes.merge_buffers(self.replicas, start, taken)
        return self.processes.sum_gradients(self.replicas, losses, taken)

    def _add_part(self, part: Batch, num_targets: int) -> Tensor:
        """Adds a part's gradient, over the whole step's targets: a short part weighs less."""
        return self.run(part, self.loss, 1 / num_targets) / num_targets

    def _hand_in_draws(self, step: int, first_sample: int) -> None:
        seeds = self.batches.seeds
        if self._num_dropouts:
            keys = [
                [derive_seed(seed, "dropout", step * self._num_dropouts + i) for seed in seeds]
                for i in range(self._num_dropouts)
            ]
            device = next(self.replicas.parameters()).device
            self.replicas.set_dropout(torch.tensor(keys, device=device), first_sample)
        if self.replicas.foreign_seeds is not None:
            index = step * self.sizes.batch_size + first_sample
            self.replicas.foreign_seeds = [derive_seed(seed, "foreign", index) for seed in seeds]

    def _own_samples(self, num_samples: int) -> Tensor:
        """Indices of this process's samples in a step of `num_samples`."""
        own = self.sizes.micro_bounds(num_samples, self.share)
        return torch.tensor([index for first, last in own for index in range(first, last)]).long()


def _count(bounds: list[Bounds]) -> int:
    return sum(last - first for first, last in bounds)
