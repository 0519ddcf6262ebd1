"""Batch normalization of sequences with separate statistics at each position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.affine import Affine
from normexp.norms.contract import State
from normexp.norms.kernel import batch_norm, normalize_groups
from normexp.norms.moments import Moments, pool, unbiased
from normexp.norms.running import RunningMomentsNorm


@dataclass(eq=False, repr=False, kw_only=True)
class BatchNormPerPosition(RunningMomentsNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments over the samples at position t.

    Shape (N, C, T) in and out. No position looks at another, in training or in evaluation. Running
    averages are (T, C), a row per position; a shorter input moves the first rows, and a mask (N, T)
    leaves out padding. Batch norm of C * T features (arXiv:1502.03167), but with a weight and a
    bias per channel like every norm here: otherwise it would learn T times as much as the norms it
    is compared with.

    Computed as batch norm of T * C features in position order, the order in which sites hold
    tokens. If only one sample is real at a position, its variance is zero: training outputs the
    bias there, and the running variance stays as it was.

    Args:
        num_positions: T, the longest sequence; only padding may lie beyond.
        momentum: weight of the new value in the running averages; null does not fit, because
            positions are not real equally often.

    Raises:
        UserError: in forward, one sample in training, an input that is not (N, C, T), or real
            positions beyond `num_positions`.
    """

    num_positions: int
    momentum: float = 0.1
    needs_momentum = True

    def add_state(self) -> None:
        super().add_state()
        self.running_mean = torch.zeros(self.num_positions, self.num_features)
        self.running_var = torch.ones(self.num_positions, self.num_features)
        self.num_values = torch.zeros(self.num_positions, dtype=torch.int64)

    def affine_of_features(self, x: Tensor, affine: Affine) -> Affine:
        """Returns weight and bias (T * C,) of the features of x (..., C, T), in its dtype."""
        return Affine(*[None if v is None else v.repeat(x.shape[-1]) for v in affine])

    def forward_groups(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.numel() == 0:
            return self.pass_empty(x)
        if x.ndim != 4:
            raise UserError(
                "batch norm per position needs one axis of positions, (N, C, T), but got shape "
                f"{tuple(x.shape[1:])}; try norm=batch, or norm.view=sequence for tokens"
            )
        surplus = x.shape[-1] - self.num_positions
        if surplus <= 0:
            return super().forward_groups(x, mask)
        padding = None if mask is None else mask[..., self.num_positions :]
        if padding is None or bool(padding.any()):
            raise UserError(
                f"a sequence of {x.shape[-1]} positions is longer than "
                f"num_positions={self.num_positions} of batch norm per position; set "
                f"+norm.num_positions={x.shape[-1]}, or qk_norm=false if it is true: there each "
                "head of a token is a position"
            )
        known = None if mask is None else mask[..., : self.num_positions]
        return F.pad(super().forward_groups(x[..., : self.num_positions], known), (0, surplus))

    def check_shape(self, shape: torch.Size) -> None:
        if shape[0] == 1:
            raise UserError(
                "batch norm per position got one sample, so one value per statistic; it needs 2 or "
                "more: try a larger batch_size or norm_batch_size"
            )

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        length = x.shape[-1]
        features = x.mT.flatten(-2)  # (G, N, T * C)
        real = None if real is None else real.expand(x.shape).mT.flatten(-2)
        affine = self.affine_of_features(x, affine)
        out, moments = normalize_groups(features, real, affine, self.eps)
        self._advance_rows(pool(moments, dim=0), length)
        return out.unflatten(-1, (length, -1)).mT

    def normalize_by_running(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        length = x.shape[-1]
        averages = (self.running_mean, self.running_var)
        mean, var = (rows[:length].flatten().to(x.dtype) for rows in averages)
        affine = self.affine_of_features(x, affine)
        features = x.flatten(0, 1).mT.flatten(-2)  # (G * N, T * C)
        out = batch_norm(features, affine, (mean, var), None, self.eps, is_stacked=self.is_stacked)
        return out.unflatten(-1, (length, -1)).mT.unflatten(0, x.shape[:2])

    @torch.no_grad()
    def _advance_rows(self, moments: Moments, length: int) -> None:
        """Moves the first rows one step by moments (1, 1, T * C), each by its number of values."""
        beyond = (0, 0, 0, self.num_positions - length)
        mean, var = (F.pad(m.view(length, -1), beyond) for m in moments[:2])
        count = torch.zeros_like(moments.mean) + moments.count
        count = F.pad(count.view(length, -1)[:, :1], beyond)  # (num_positions, 1)
        self.num_batches_tracked.add_(1)
        self.num_values.copy_(count.squeeze(1))
        weight = self.momentum * (count > 0).to(mean.dtype)
        self.running_mean.mul_(1 - weight).add_(weight * mean)
        weight = self.momentum * (count > 1).to(mean.dtype)  # a variance needs two values
        self.running_var.mul_(1 - weight).add_(weight * unbiased(var, count))

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """As `RunningMomentsNorm.merge_state`, for each position by its number of values."""
        merged = super().merge_state(start, parts, shares)
        known = merged["num_values"][..., None] > 1
        merged["running_var"] = torch.where(known, merged["running_var"], start["running_var"])
        return merged
