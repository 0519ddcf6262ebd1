"""Batch normalization: (x - mean) / sqrt(var + eps) * weight + bias, per channel.

In training the moments pool positions and samples; evaluation uses their running averages.

    BatchNorm         all samples of a forward             nn.BatchNorm2d
    GhostBatchNorm    a sub-batch of a forward
    SyncBatchNorm     all samples of all processes         nn.SyncBatchNorm
    FrozenBatchNorm   none, since statistics are fixed     torchvision's FrozenBatchNorm2d
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.base import (
    Affine,
    AffineNorm,
    Moments,
    at_least_one,
    centre,
    count_values,
    knobs,
)
from normexp.norms.contract import Mask, State
from normexp.norms.kernel import batch_norm
from normexp.norms.running import RunningMomentsNorm, group_dims


@knobs
class BatchNorm(RunningMomentsNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias, moments over all samples and positions.

    Equals torch.nn's BatchNorm. Training normalizes by the biased variance of the batch, and the
    running variance averages the unbiased one. Evaluation uses the averages. arXiv:1502.03167.

    Args:
        track_running_stats: false keeps no running averages and evaluates with batch statistics;
            set to False later, it holds the averages.
        unbiased_running_var: false averages the biased variance, as norms of other libraries do.
    """

    track_running_stats: bool = True
    unbiased_running_var: bool = True

    def add_state(self) -> None:
        super().add_state()
        if not self.track_running_stats:
            for name in dict(self.named_buffers()):
                setattr(self, name, None)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if not self.widens_itself(x, mask):
            return super().forward(x, mask)
        # Without the axis of groups, which would slow small inputs.
        self.check_shape(x.shape)
        return self.normalize_in_kernel(x, self.affine_like(x))

    def widens_itself(self, x: Tensor, mask: Mask) -> bool:
        return mask is None and self.training and self.kernel_moves_averages(x)

    @property
    def moves_averages(self) -> bool:
        return super().moves_averages and self.running_mean is not None

    def normalize_by_running(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if self.running_mean is not None:
            return super().normalize_by_running(x, real, affine)
        self.check_shape(x.shape[1:])
        return self.normalize_by_batch(x, real, affine)

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        return super().merge_state(start, parts, shares) if start else {}


@knobs
class GhostBatchNorm(RunningMomentsNorm):
    """Batch norm whose statistics in training pool `ghost_size` samples and all positions.

    Samples are split in order; the last sub-batch may be smaller. Evaluation as batch norm.
    arXiv:1705.08741.

    The authors' code (eladhoffer/bigBatch) moves the running averages once per sub-batch, so that
    the last weighs most. Here they move once per step, by the moments of all samples, as when a
    site splits its batch by norm_batch_size.

    Args:
        ghost_size: samples that share statistics; tokens in the view `token`.
    """

    ghost_size: int

    def check_knobs(self) -> None:
        super().check_knobs()
        self.require_positive("ghost_size", 16)

    def check_shape(self, shape: torch.Size) -> None:
        for size in (min(shape[0], self.ghost_size), shape[0] % self.ghost_size):
            if size:
                super().check_shape(torch.Size((size, *shape[1:])))

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        num_samples = x.shape[1]
        size = min(self.ghost_size, num_samples)
        missing = -num_samples % size
        if missing:  # fill the last sub-batch with padding
            padding = (
                *[0, 0] * (x.ndim - 2),
                0,
                missing,
            )  # of the axes from the last to the samples
            if real is None:
                real = torch.ones_like(x[:, :, :1], dtype=torch.bool)
            x, real = F.pad(x, padding), F.pad(real, padding)
        shape = x.shape[:2]
        x = x.unflatten(1, (-1, size)).flatten(0, 1)  # (G * g, size, C, *)
        real = None if real is None else real.unflatten(1, (-1, size)).flatten(0, 1)
        out = super().normalize_by_batch(x, real, affine)
        return out.flatten(0, 1).unflatten(0, shape)[:, :num_samples]


class SyncBatchNorm(RunningMomentsNorm):
    """Batch norm with moments over the samples and positions of all processes of a training.

    Without torch.distributed, or with one process, it is batch norm. Otherwise all processes must
    call it together; their numbers of samples may differ, and a process may have a single value per
    channel. Gradients pass through the exchange, so they are those of the sum of all processes'
    losses, which DistributedDataParallel divides by the number of processes. Evaluation exchanges
    nothing.

    torch.nn.SyncBatchNorm computes the same, but only on GPUs. The variance takes a second
    exchange, of squares about the mean, because E[x^2] - E[x]^2 in one exchange loses digits.
    """

    synchronized = True

    def check_shape(self, shape: torch.Size) -> None:
        if not _has_peers():
            super().check_shape(shape)

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if not _has_peers():
            return super().normalize_by_batch(x, real, affine)
        dims = group_dims(x)
        total = x.sum(dim=dims, keepdim=True)  # (G, 1, C, 1, ...)
        count_here = torch.zeros_like(total[:, :, :1]) + count_values(x, real, dims)
        totals = _AddOverProcesses.apply(torch.cat([total, count_here], dim=2))
        count = totals[:, :, -1:].detach()
        mean = totals[:, :, :-1] / at_least_one(count)
        centred = centre(x, mean, real)
        squares = _AddOverProcesses.apply(centred.square().sum(dim=dims, keepdim=True))
        var = squares / at_least_one(count)
        self.advance(Moments(mean, var, count))
        return affine.apply(centred, torch.rsqrt(var + self.eps), axis=2)


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _AddOverProcesses(torch.autograd.Function):
    """Sums a tensor over all processes, and its gradient, since each value is in every sum."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _AddOverProcesses.forward(ctx, grads[0])


class FrozenBatchNorm(AffineNorm):
    """(x - running_mean) / sqrt(running_var + eps) * weight + bias, with fixed statistics.

    Training and evaluation are the same. The statistics are 0 and 1 unless loaded from a batch
    norm, whose state_dict fits. Weight and bias are trained; torchvision's FrozenBatchNorm2d fixes
    them too, to fine-tune detectors at 1 or 2 images.
    """

    running_mean: Tensor
    running_var: Tensor

    def add_state(self) -> None:
        self.register_buffer("running_mean", self.vector(0))
        self.register_buffer("running_var", self.vector(1))
        self.register_load_state_dict_pre_hook(_drop_counter)

    def normalize(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        mean, var = self.running_mean.to(x.dtype), self.running_var.to(x.dtype)
        return batch_norm(x, affine, (mean, var), None, self.eps)


def _drop_counter(_: nn.Module, state: dict[str, Any], prefix: str, *_others: object) -> None:
    """Drops the step counter from a batch norm's state_dict."""
    state.pop(f"{prefix}num_batches_tracked", None)
