"""Batch normalization over the samples of all processes of a distributed training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normexp.norms.batch import BatchNorm, refuse_one_value
from normexp.norms.moments import Moments, pool
from normexp.norms.variant import (
    at_least_one,
    centred,
    count_groups,
    over_groups,
    scale_and_shift,
    sum_groups,
)


class SyncBatchNorm(BatchNorm):
    """Batch norm with moments over the samples and positions of all processes.

    Shape (N, C, *) in and out, statistics in float32 or wider. Where torch.distributed is not
    initialised, or has one process, it is batch norm. Otherwise all processes must enter it
    together; they may bring different numbers of samples. Its sums are added over the processes by
    an all-reduce that gradients pass: they are those of the sum of all processes' losses, which
    DistributedDataParallel divides by the number of processes. Evaluation exchanges nothing.

    torch.nn.SyncBatchNorm computes the same on GPUs alone; this one works wherever the backend
    does, as gloo on a CPU. It takes the variance in a second exchange, of squares about the common
    mean; E[x^2] - E[x]^2 in one, as some have it, loses digits.

    Raises:
        UserError: as `BatchNorm`; one value per channel is refused where there is one process.
    """

    spans_devices = True  # a step that several devices share is not split between them

    def refuse(self, shape: torch.Size) -> None:
        if not _has_peers():
            refuse_one_value(shape)

    def normalize_by_batch(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if not _has_peers():
            return super().normalize_by_batch(x, mask, weight, bias)
        own = count_groups(x, mask)
        columns = x.new_zeros(len(x), 1) + own  # (G, 1)
        total = _AddOverProcesses.apply(torch.cat([sum_groups(x), columns], dim=1))
        count = total[:, -1:].detach()
        mean = total[:, :-1] / at_least_one(count)
        deviations = centred(x, mean, mask)
        var = _AddOverProcesses.apply(sum_groups(deviations.square())) / at_least_one(count)
        self._advance(pool(Moments(mean, var, count)))
        scale = over_groups(torch.rsqrt(var + self.eps), x)
        return scale_and_shift(deviations, scale, weight, bias)


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _AddOverProcesses(torch.autograd.Function):
    """The sum over all processes; so is the gradient, as each process's value is in all sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total
