"""Batch norm over fewer samples than a forward has, or over more.

Ghost batch norm splits the samples of a forward; synchronized batch norm pools the samples of all
processes of a training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.affine import Affine
from normexp.norms.batch import RunningMomentsNorm, group_dims, refuse_one_value
from normexp.norms.moments import Moments, at_least_one, centre, count_values, widen


@dataclass(eq=False, repr=False, kw_only=True)
class GhostBatchNorm(RunningMomentsNorm):
    """Batch norm whose statistics in training pool `ghost_size` samples and all positions.

    Samples are split in order; the last sub-batch may be smaller. Evaluation as batch norm.
    arXiv:1705.08741.

    Implementations differ in the running averages. The authors' code (eladhoffer/bigBatch) and
    TabNet's move them once per sub-batch, so that the last weighs most. Here they move once per
    step, by the moments of all samples, as when a site splits its batch by norm_batch_size.

    Args:
        ghost_size: samples that share statistics; tokens in the view `token`.

    Raises:
        UserError: as `RunningNorm`, for each sub-batch; a ghost_size below one.
    """

    ghost_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ghost_size < 1:
            raise UserError(f"ghost_size={self.ghost_size} is not positive; try norm.ghost_size=16")

    def refuse(self, shape: torch.Size) -> None:
        for size in (min(shape[0], self.ghost_size), shape[0] % self.ghost_size):
            if size:
                refuse_one_value(torch.Size((size, *shape[1:])))

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        num_samples = x.shape[1]
        size = min(self.ghost_size, num_samples)
        missing = -num_samples % size
        if missing:  # fills the last sub-batch with padding
            by_sample = (*[0, 0] * (x.ndim - 2), 0, missing)
            real = torch.ones_like(x[:, :, :1], dtype=torch.bool) if real is None else real
            x, real = F.pad(x, by_sample), F.pad(real, by_sample)
        shape = x.shape[:2]
        x = x.unflatten(1, (-1, size)).flatten(0, 1)  # (G * g, size, C, *)
        real = None if real is None else real.unflatten(1, (-1, size)).flatten(0, 1)
        out = self.normalize_as_batch_norm(x, real, affine)
        return out.flatten(0, 1).unflatten(0, shape)[:, :num_samples]


class SyncBatchNorm(RunningMomentsNorm):
    """Batch norm with moments over the samples and positions of all processes of a training.

    Without torch.distributed, or with one process, it is batch norm. Otherwise all processes must
    call it together, possibly with different numbers of samples. Gradients pass through its
    all-reduce: they belong to the sum of all processes' losses, which DistributedDataParallel
    divides by the number of processes. Evaluation exchanges nothing.

    torch.nn.SyncBatchNorm computes the same, but only on GPUs; this one also works on a CPU, with
    gloo. The variance takes a second exchange, of squares about the common mean, because computing
    E[x^2] - E[x]^2 in one exchange loses digits.

    Raises:
        UserError: as `RunningNorm`, but one value per channel is accepted from one of several
            processes.
    """

    spans_devices = True  # a step that several devices share is not split between them

    def refuse(self, shape: torch.Size) -> None:
        if not _has_peers():
            refuse_one_value(shape)

    def pass_empty(self, x: Tensor) -> Tensor:
        if self.training and _has_peers():  # the other processes wait for this one's sums
            wide = widen(x)
            return self.normalize_by_batch(wide, None, self.affine_like(wide)).to(x.dtype)
        return super().pass_empty(x)

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        if not _has_peers():
            return self.normalize_as_batch_norm(x, real, affine)
        dims = group_dims(x)
        total = x.sum(dim=dims, keepdim=True)  # (G, 1, C, 1, ...)
        own = torch.zeros_like(total[:, :, :1]) + count_values(x, real, dims)
        both = _AddOverProcesses.apply(torch.cat([total, own], dim=2))
        count = both[:, :, -1:].detach()
        mean = both[:, :, :-1] / at_least_one(count)
        centred = centre(x, mean, real)
        squares = _AddOverProcesses.apply(centred.square().sum(dim=dims, keepdim=True))
        var = squares / at_least_one(count)
        self.advance(Moments(mean, var, count))
        return affine.apply(centred, torch.rsqrt(var + self.eps), axis=2)


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _AddOverProcesses(torch.autograd.Function):
    """Sums a tensor over all processes; sums its gradient too, as each value is in every sum."""

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
