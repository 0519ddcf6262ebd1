"""Batch normalization, with ghost groups in one call and a running state that can be merged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.moments import (
    Moments,
    normalize_batch,
    normalize_groups,
    pool,
    unbiased,
    zero_masked_groups,
)
from normexp.norms.none import in_dtype_of
from normexp.norms.site import widen
from normexp.norms.state import State


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, moments over all samples and positions.

    Shape (N, C, *) in and out, statistics in float32 or wider; torch.nn's BatchNorm. Training uses
    the biased variance of the batch and moves the running averages, with the unbiased one;
    evaluation uses the running averages. arXiv:1502.03167.

    Args:
        momentum: weight of the new value in the running averages; None averages all steps equally.
        track_running_stats: false keeps no running averages and evaluates with batch statistics.

    Raises:
        UserError: momentum outside (0, 1]; or, in forward, one value per channel to pool.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    num_values: Tensor | None  # per statistic in the last training forward; merging weighs by it
    unbiased_running_var = True  # running_var averages n / (n - 1) times the biased variance

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        if momentum is not None and not 0 < momentum <= 1:
            raise UserError(
                f"momentum={momentum} is not in (0, 1]; try norm.momentum=0.1, or null to average "
                "all steps equally"
            )
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        tracks = track_running_stats
        self.register_buffer("running_mean", torch.zeros(num_features) if tracks else None)
        self.register_buffer("running_var", torch.ones(num_features) if tracks else None)
        counter = torch.tensor(0) if tracks else None
        self.register_buffer("num_batches_tracked", counter)
        # An integer: casting the module to a half precision must not round it.
        counter = torch.tensor(0) if tracks else None
        self.register_buffer("num_values", counter, persistent=False)

    def extra_repr(self) -> str:
        affine, tracks = self.weight is not None, self.running_mean is not None
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={affine}, "
            f"track_running_stats={tracks}"
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        own = type(self).normalize_by_batch is not BatchNorm.normalize_by_batch
        if self.training and mask is None and x.numel() > 0 and not own:
            wide = widen(x)
            if self._kernel_advances(wide):  # without an axis of groups: small inputs feel it
                self.refuse(x.shape)
                weight, bias = in_dtype_of(wide, self.weight), in_dtype_of(wide, self.bias)
                averages = (self.running_mean, self.running_var)
                return self._fused(wide, weight, bias, *averages).to(x.dtype)
        out = self.forward_groups(x[None], None if mask is None else mask[None])
        return out.squeeze(0)  # out[0] would cost a tensor of zeros and a copy in the backward

    def forward_groups(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Training with statistics per group, x (G, N, C, *) and mask (G, N, *).

        The running averages move once, by the moments of all values of all groups together.
        """
        if x.numel() == 0:
            return x  # no sample, no moments
        wide = zero_masked_groups(widen(x), mask)
        weight, bias = in_dtype_of(wide, self.weight), in_dtype_of(wide, self.bias)
        if self.training:
            self.refuse(x.shape[1:])
            out = self.normalize_by_batch(wide, mask, weight, bias)
        else:
            out = self.normalize_by_running(wide, mask, weight, bias)
        return zero_masked_groups(out, mask).to(x.dtype)

    def refuse(self, shape: torch.Size) -> None:
        """Raises UserError for an input of this shape (N, C, *) that has too few values."""
        refuse_one_value(shape)

    def normalize_by_batch(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The output in training for x (G, N, C, *), zero where masked; moves the state one step.

        In one kernel, running averages included, where that computes the same.
        """
        if mask is None and len(x) == 1 and self._kernel_advances(x):
            averages = (self.running_mean, self.running_var)
            return self._fused(x.squeeze(0), weight, bias, *averages)[None]
        real = None if mask is None else mask.unsqueeze(2)
        out, moments = normalize_groups(x, real, weight, bias, self.eps)
        self._advance(pool(moments))
        return out

    def normalize_by_running(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The output in evaluation for x (G, N, C, *), zero where masked."""
        flat = x.flatten(0, 1)
        if self.running_mean is None:
            refuse_one_value(flat.shape)
            real = None if mask is None else mask.flatten(0, 1).unsqueeze(1)
            out, _ = normalize_batch(flat, real, weight, bias, self.eps)
        else:
            mean, var = in_dtype_of(x, self.running_mean), in_dtype_of(x, self.running_var)
            out = F.batch_norm(flat, mean, var, weight, bias, False, 0.0, self.eps)
        return out.unflatten(0, x.shape[:2])

    def _kernel_advances(self, x: Tensor) -> bool:
        """Whether the kernel can move the running averages itself: it knows a fixed momentum."""
        if self.momentum is None or not self.unbiased_running_var:
            return False
        average = self.running_mean
        return average is not None and average.dtype == x.dtype

    def _fused(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
    ) -> Tensor:
        """Training on x (N, C, *) in one kernel, which moves running mean and var in place."""
        steps, values = self.num_batches_tracked, self.num_values
        assert steps is not None and values is not None and self.momentum is not None
        steps.add_(1)
        values.fill_(x.numel() // x.shape[1])
        return F.batch_norm(x, mean, var, weight, bias, True, self.momentum, self.eps)

    @torch.no_grad()
    def _advance(self, moments: Moments) -> None:
        """Moves the running averages by one step; in place and by ops that vmap has rules for."""
        if not self.training or self.running_mean is None:
            return
        assert self.running_var is not None
        assert self.num_batches_tracked is not None and self.num_values is not None
        mean, var, count = moments
        self.num_batches_tracked.add_(1)
        factor = self._factor(self.num_batches_tracked, mean.dtype)
        if isinstance(count, Tensor):
            self.num_values.copy_(count[0])
            factor = factor * (count > 0).to(mean.dtype)  # all padding: nothing to move by
        else:
            self.num_values.fill_(count)
        self.running_mean.mul_(1 - factor).add_(factor * mean)
        var = unbiased(var, count) if self.unbiased_running_var else var
        self.running_var.mul_(1 - factor).add_(factor * var)

    def _factor(self, step: Tensor, dtype: torch.dtype) -> float | Tensor:
        """Weight of the new value at the `step`-th update, counted from 1."""
        return self.momentum if self.momentum is not None else 1 / step.to(dtype)

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """State after one training forward on all values, from `parts` that each saw some of them.

        Each part was reached from `start` by one training forward. Its moments m_i, v_i follow from
        running_i = (1 - f) * start + f * moment_i, f the momentum, and are pooled over n_i values:
        m = sum w_i m_i, v = sum w_i (v_i + (m_i - m)^2), w_i = n_i / sum n_i. The weights are the
        parts' own `num_values`, which know how many were real, and not `shares`. All values may
        lead with replica axes.
        """
        assert len(shares) == len(parts)
        if self.running_mean is None:
            return {}
        means, ends = (
            torch.stack([part[name] for part in parts]) for name in ("running_mean", "running_var")
        )  # (parts, ..., C)
        values = torch.stack([part["num_values"] for part in parts])  # (parts, ...)
        step = start["num_batches_tracked"] + 1
        factor = self._factor(step[..., None], means.dtype)
        counts = values[..., None].to(means.dtype)
        total = counts.sum(dim=0)
        weights = counts / total.clamp(min=1)
        kept = (1 - factor) * start["running_var"]
        mean = (weights * means).sum(dim=0)
        # Both terms carry the factor: f * v_i, and f * (m_i - m)^2.
        within, between = ends - kept, (means - mean).square() / factor
        if self.unbiased_running_var:
            within = within * (counts - 1).clamp(min=0) / counts.clamp(min=1)
        var = (weights * (within + between)).sum(dim=0)
        var = kept + (unbiased(var, total) if self.unbiased_running_var else var)
        return {
            "running_mean": torch.where(total > 0, mean, start["running_mean"]),
            "running_var": torch.where(total > 0, var, start["running_var"]),
            "num_batches_tracked": step,
            "num_values": values.sum(dim=0),
        }


def refuse_one_value(shape: torch.Size) -> None:
    """Raises where x (N, C, *) has one value per channel: its variance is zero, its output bias."""
    if shape.numel() == shape[1]:
        raise UserError(
            f"batch norm got one value per channel, an input of shape {tuple(shape)}; it needs "
            "2 or more: try a larger batch_size or norm_batch_size"
        )
