"""Batch normalization of sequences with statistics of their own at each position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.moments import Moments, normalize_groups, pool, unbiased
from normexp.norms.state import State


class BatchNormPerPosition(BatchNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments over the samples at position t.

    Shape (N, C, T) in and out, statistics in float32 or wider. No position looks at another, in
    training as in evaluation. Batch norm of C * T features (arXiv:1502.03167), but with a weight
    and a bias per channel as every norm here has them: else it would learn T times as much as the
    norms that it is compared with. Running averages are (T, C), a row per position; a shorter input
    moves the first rows, and a mask (N, T) leaves out what is padding.

    Where one sample alone is real at a position its variance is zero: training outputs the bias
    there, and the running variance stays as it was.

    Args:
        num_positions: T, the longest sequence; only padding may lie beyond.
        momentum: weight of the new value in the running averages.

    Raises:
        UserError: momentum outside (0, 1]; in forward, one sample in training, an input that is not
            (N, C, T), or real positions beyond `num_positions`.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    num_values: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        num_positions: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        if momentum is None:
            raise UserError(
                "momentum=null does not fit batch norm per position, whose positions are not real "
                "equally often; try norm.momentum=0.1"
            )
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.num_positions = num_positions
        self.running_mean = torch.zeros(num_positions, num_features)
        self.running_var = torch.ones(num_positions, num_features)
        self.num_values = torch.zeros(num_positions, dtype=torch.int64)

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return (
            f"{self.num_features}, positions={self.num_positions}, eps={self.eps}, "
            f"momentum={self.momentum}, affine={affine}"
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim != 3:
            raise UserError(
                "batch norm per position needs one positions axis (N, C, T), not an input of shape "
                f"{tuple(x.shape)}; try norm=batch, or norm.view=sequence for tokens"
            )
        return super().forward(x, mask)

    def forward_groups(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Training with statistics per group, x (G, N, C, T) and mask (G, N, T).

        The running averages move once, by the moments of all values of all groups together.
        """
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

    def normalize_by_batch(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """As batch norm of features without positions."""
        weight, bias = self.affine_by_feature(weight, bias, x)
        whole = mask is None and len(x) == 1 and x.shape[-1] == self.num_positions
        if whole and self._kernel_advances(x):
            # Clones: the kernel keeps them for its backward, where they must not have moved again.
            mean, var = (join(rows.T, x).clone() for rows in (self.running_mean, self.running_var))
            out = self._fused(join(x, x).squeeze(0), weight, bias, mean, var)[None]
            self.running_mean.copy_(split(mean, x).T)
            self.running_var.copy_(split(var, x).T)
            return split(out, x)
        real = None if mask is None else join(mask.unsqueeze(2).expand(x.shape), x)
        out, moments = normalize_groups(join(x, x), real, weight, bias, self.eps)
        mean, var, count = pool(moments)
        count = split(count, x).T if isinstance(count, Tensor) else count
        self._advance(Moments(split(mean, x).T, split(var, x).T, count))
        return split(out, x)

    def normalize_by_running(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        del mask
        averages = (self.running_mean, self.running_var)
        mean, var = (join(rows[: x.shape[-1]].T, x).to(x.dtype) for rows in averages)
        weight, bias = self.affine_by_feature(weight, bias, x)
        features = join(x, x).flatten(0, 1)  # (G * N, C * T)
        out = F.batch_norm(features, mean, var, weight, bias, False, 0.0, self.eps)
        return split(out.unflatten(0, x.shape[:2]), x)

    def affine_by_feature(
        self, weight: Tensor | None, bias: Tensor | None, x: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias (C * T,) of the features of x (G, N, C, T), from those of channels."""
        if weight is None or bias is None:
            return None, None
        weight, bias = (join(one[:, None].expand(x.shape[2:]), x) for one in (weight, bias))
        return weight, bias

    @torch.no_grad()
    def _advance(self, moments: Moments) -> None:
        """Moves the running averages by one step, each row by what it has: a variance needs two."""
        assert self.momentum is not None
        mean, var, count = moments  # (T, C), T of the input
        count = count[:, 0] if isinstance(count, Tensor) else mean.new_full((len(mean),), count)
        beyond = self.num_positions - len(mean)
        mean, var = F.pad(mean, (0, 0, 0, beyond)), F.pad(var, (0, 0, 0, beyond))
        count = F.pad(count, (0, beyond))
        self.num_batches_tracked.add_(1)
        self.num_values.copy_(count)
        count = count[:, None]
        factor = self.momentum * (count > 0).to(mean.dtype)
        self.running_mean.mul_(1 - factor).add_(factor * mean)
        factor = self.momentum * (count > 1).to(mean.dtype)
        self.running_var.mul_(1 - factor).add_(factor * unbiased(var, count))

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """As `BatchNorm.merge_state`, position by position with the numbers of values there."""
        merged = super().merge_state(start, parts, shares)
        known = merged["num_values"][..., None] > 1
        merged["running_var"] = torch.where(known, merged["running_var"], start["running_var"])
        return merged


def join(values: Tensor, x: Tensor) -> Tensor:
    """values (..., C, T) as features (..., C * T), in the order in which `x` (..., C, T) lies.

    A site shows (B, T, C) transposed: in the order of memory the largest tensors are not copied.
    """
    return (values.mT if _lies_by_position(x) else values).flatten(-2)


def split(features: Tensor, x: Tensor) -> Tensor:
    """What `join` made of values (..., C, T)."""
    num_channels, length = x.shape[-2:]
    if _lies_by_position(x):
        return features.unflatten(-1, (length, num_channels)).mT
    return features.unflatten(-1, (num_channels, length))


def _lies_by_position(x: Tensor) -> bool:
    return x.stride(-1) > x.stride(-2)


def refuse_real_positions(padding: Tensor | None, length: int, num_positions: int) -> None:
    """Raises unless the mask says that all of the positions beyond `num_positions` are padding."""
    if padding is None or bool(padding.any()):
        raise UserError(
            f"a sequence of {length} positions is longer than num_positions={num_positions} of "
            f"batch norm per position; set +norm.num_positions={length}, or qk_norm=false where it "
            "is true: each head of a token is a position there"
        )
