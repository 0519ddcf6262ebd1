"""Batch normalization of sequences with separate statistics at each position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.affine import Affine
from normexp.norms.batch import RunningMomentsNorm, normalize_groups
from normexp.norms.moments import pool, unbiased
from normexp.norms.state import State


class PositionwiseNorm(RunningMomentsNorm):
    """Abstract: (x_t - mean_t) / sqrt(var_t + eps), moments over the samples at position t.

    Shape (N, C, T) in and out. No position looks at another, in training or in evaluation. Running
    averages are (T, C), a row per position; a shorter input moves the first rows, and a mask (N, T)
    leaves out padding. A subclass says which weight and bias each position gets.

    If only one sample is real at a position, its variance is zero: training outputs the bias there,
    and the running variance stays as it was.

    Args:
        num_positions: T, the longest sequence; only padding may lie beyond.
        momentum: weight of the new value in the running averages.

    Raises:
        UserError: momentum outside (0, 1]; in forward, one sample in training, an input that is not
            (N, C, T), or real positions beyond `num_positions`.
    """

    momentum: float

    def __init__(
        self,
        num_features: int,
        *,
        num_positions: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        if momentum is None:
            raise UserError(
                "momentum=null does not fit batch norm per position, whose positions are not real "
                "equally often; try norm.momentum=0.1"
            )
        self.num_positions = num_positions
        self.running_mean = torch.zeros(num_positions, num_features)
        self.running_var = torch.ones(num_positions, num_features)
        self.num_values = torch.zeros(num_positions, dtype=torch.int64)

    def affine_per_position(self, x: Tensor, affine: Affine) -> tuple[Tensor | None, Tensor | None]:
        """Returns weight and bias, each (C, T) or None, for x (..., C, T)."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim != 3:
            raise UserError(
                "batch norm per position needs one positions axis (N, C, T), not an input of shape "
                f"{tuple(x.shape)}; try norm=batch, or norm.view=sequence for tokens"
            )
        return super().forward(x, mask)

    def forward_groups(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        surplus = x.shape[-1] - self.num_positions
        if surplus <= 0:
            return super().forward_groups(x, mask)
        padding = None if mask is None else mask[..., self.num_positions :]
        refuse_real_positions(padding, x.shape[-1], self.num_positions)
        known = None if mask is None else mask[..., : self.num_positions]
        return F.pad(super().forward_groups(x[..., : self.num_positions], known), (0, surplus))

    def refuse(self, shape: torch.Size) -> None:
        if shape[0] == 1:
            raise UserError(
                "batch norm per position got one sample, so one value per statistic; it needs 2 or "
                "more: try a larger batch_size or norm_batch_size"
            )

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        vectors = self._affine_of_features(x, affine)
        whole = real is None and len(x) == 1 and x.shape[-1] == self.num_positions
        if whole and self.kernel_moves_averages(x):
            return split(self._normalize_in_kernel(x, vectors), x)
        real = None if real is None else join(real.expand(x.shape), x)
        out, moments = normalize_groups(join(x, x), real, vectors, self.eps)
        mean, var, count = pool(moments, dim=0)  # (1, 1, C * T)
        count = split(count.flatten(), x).T if isinstance(count, Tensor) else count
        self._advance_rows(split(mean.flatten(), x).T, split(var.flatten(), x).T, count)
        return split(out, x)

    def _normalize_in_kernel(self, x: Tensor, affine: Affine) -> Tensor:
        """Returns batch norm of the C * T features of x (1, N, C, T), and moves the averages."""
        self.num_batches_tracked.add_(1)
        self.num_values.fill_(x.shape[1])
        # Clones: the kernel keeps them for its backward, and the originals may move before it.
        mean, var = (join(rows.T, x).clone() for rows in (self.running_mean, self.running_var))
        features = join(x, x).squeeze(0)
        out = F.batch_norm(features, mean, var, *affine, True, self.momentum, self.eps)
        self.running_mean.copy_(split(mean, x).T)
        self.running_var.copy_(split(var, x).T)
        return out[None]

    def normalize_by_running(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        averages = (self.running_mean, self.running_var)
        mean, var = (join(rows[: x.shape[-1]].T, x).to(x.dtype) for rows in averages)
        vectors = self._affine_of_features(x, affine)
        features = join(x, x).flatten(0, 1)  # (G * N, C * T)
        out = F.batch_norm(features, mean, var, *vectors, False, 0.0, self.eps)
        return split(out.unflatten(0, x.shape[:2]), x)

    def _affine_of_features(self, x: Tensor, affine: Affine) -> Affine:
        """Returns the weight and bias (C * T,) of the features that `join` makes of x."""
        rows = self.affine_per_position(x, affine)
        return Affine(*[None if row is None else join(row, x).to(x.dtype) for row in rows])

    @torch.no_grad()
    def _advance_rows(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Moves the averages one step by moments (T, C), each row by its values: var needs two."""
        count = count[:, 0] if isinstance(count, Tensor) else mean.new_full((len(mean),), count)
        beyond = self.num_positions - len(mean)
        mean, var = F.pad(mean, (0, 0, 0, beyond)), F.pad(var, (0, 0, 0, beyond))
        count = F.pad(count, (0, beyond))
        self.num_batches_tracked.add_(1)
        self.num_values.copy_(count)
        count = count[:, None]
        weight = self.momentum * (count > 0).to(mean.dtype)
        self.running_mean.mul_(1 - weight).add_(weight * mean)
        weight = self.momentum * (count > 1).to(mean.dtype)
        self.running_var.mul_(1 - weight).add_(weight * unbiased(var, count))

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """As `RunningMomentsNorm.merge_state`, for each position by its number of values."""
        merged = super().merge_state(start, parts, shares)
        known = merged["num_values"][..., None] > 1
        merged["running_var"] = torch.where(known, merged["running_var"], start["running_var"])
        return merged


class BatchNormPerPosition(PositionwiseNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments over the samples at position t.

    Batch norm of C * T features (arXiv:1502.03167), but with a weight and a bias per channel like
    every norm here: otherwise it would learn T times as much as the norms it is compared with.
    """

    def affine_per_position(self, x: Tensor, affine: Affine) -> tuple[Tensor | None, Tensor | None]:
        shape = x.shape[-2:]
        weight, bias = (None if v is None else v[:, None].expand(shape) for v in affine)
        return weight, bias


def join(values: Tensor, x: Tensor) -> Tensor:
    """Returns values (..., C, T) as features (..., C * T), in the memory order of `x`.

    Sites pass (B, T, C) transposed; keeping its memory order avoids copies of the largest tensors.
    """
    return (values.mT if _lies_by_position(x) else values).flatten(-2)


def split(features: Tensor, x: Tensor) -> Tensor:
    """Returns the values (..., C, T) that `join` made into features."""
    num_channels, length = x.shape[-2:]
    if _lies_by_position(x):
        return features.unflatten(-1, (length, num_channels)).mT
    return features.unflatten(-1, (num_channels, length))


def _lies_by_position(x: Tensor) -> bool:
    return x.stride(-1) > x.stride(-2)


def refuse_real_positions(padding: Tensor | None, length: int, num_positions: int) -> None:
    """Raises UserError unless the mask marks all positions beyond `num_positions` as padding."""
    if padding is None or bool(padding.any()):
        raise UserError(
            f"a sequence of {length} positions is longer than num_positions={num_positions} of "
            f"batch norm per position; set +norm.num_positions={length}, or qk_norm=false if it is "
            "true: there each head of a token is a position"
        )
