"""Instance and group normalization for text: at each position, moments of the positions so far."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.group import GroupNorm, InstanceNorm
from normexp.norms.none import scale_and_shift, zero_masked
from normexp.norms.site import widen


class CausalGroupNorm(GroupNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments over C/G channels and s <= t.

    Shape (N, C, T) in and out, or (N, C), which is one position; an affine per channel, statistics
    in float32 or wider, in training and evaluation alike. The last position equals group norm over
    the whole sequence; with G = C this is `CausalInstanceNorm`. Groups of arXiv:1803.08494,
    cumulative as cLN of Conv-TasNet (arXiv:1809.07454), which is G = 1. Arguments as `GroupNorm`.

    Raises:
        UserError: as `GroupNorm`, one value per group in training alone; several position axes.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.training and self.num_features // self.num_groups * x.shape[2:].numel() == 1:
            raise UserError(
                f"num_groups={self.num_groups} leaves one value per group for an input of shape "
                f"{tuple(x.shape)}; try a smaller norm.num_groups"
            )
        return normalize_prefixes(x, mask, self.num_groups, self.weight, self.bias, eps=self.eps)


class CausalInstanceNorm(InstanceNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments of one channel over s <= t.

    Shape (N, C, T) in and out, an affine per channel unless told otherwise, statistics in float32
    or wider, in training and evaluation alike. The first real position of a sample has one value
    and so variance 0: its output is the bias, whatever it holds. A sequence of one position is
    therefore refused in training; in evaluation a text may begin with it. Instance norm of
    arXiv:1607.08022 on each prefix.

    Raises:
        UserError: an input without positions, or with one in training; several position axes.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim == 2 or self.training and x.shape[2:].numel() == 1:
            raise UserError(
                f"causal instance norm needs positions to pool, and an input of shape "
                f"{tuple(x.shape)} has one; try norm=causal_group, or norm.view=sequence for tokens"
            )
        return normalize_prefixes(x, mask, self.num_features, self.weight, self.bias, eps=self.eps)


def normalize_prefixes(
    x: Tensor,
    mask: Tensor | None,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
) -> Tensor:
    """Normalizes each position by its group's moments over the real positions up to it.

    Shapes: x (N, C, T) or (N, C), mask (N, T) or (N,), weight and bias (C,) -> as x.
    """
    if x.ndim > 3:
        raise UserError(
            f"a causal norm needs one positions axis (N, C, T), and an input of shape "
            f"{tuple(x.shape)} has {x.ndim - 2}; try norm=group or norm=instance"
        )
    wide = zero_masked(widen(x), mask)
    groups = wide.view(*x.shape[:2], -1).unflatten(1, (num_groups, -1))  # (N, G, C/G, T)
    real = None if mask is None else mask.view(-1, 1, groups.shape[-1])
    centred, var = _centre_prefixes(groups, real)
    out = (centred * torch.rsqrt(var + eps).unsqueeze(2)).flatten(1, 2).view(x.shape)
    return zero_masked(scale_and_shift(out, weight, bias), mask).to(x.dtype)


def _centre_prefixes(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """x_t - mean_t and the biased var_t of x (N, G, K, T) over K and the real positions s <= t.

    Shapes: `real` (N, 1, T), x zero where it is false -> (N, G, K, T) and (N, G, T).

    With c_s the first of the two at s, a group's squared deviations grow there by sum(c_s^2), and
    by sum(c_s)^2 / (number of values before s) since the mean has moved for those before (after
    Chan, Golub and LeVeque 1979).

    Accuracy: no term is negative, so no digits cancel. Sums are of differences from the first real
    value, so that a constant added to a sequence costs none beyond those its own rounding takes.
    """
    size, num_positions = x.shape[2:]  # K, T
    if real is None:
        first = x[..., :1]
        count = torch.arange(1, num_positions + 1, dtype=x.dtype, device=x.device)
    else:
        first = x.take_along_dim(real.int().argmax(dim=-1)[:, None, None], dim=-1)
        count = real.cumsum(dim=-1).clamp(min=1).to(x.dtype)  # before the first real one: 0 / 1
    count = count * size  # of values up to a position
    before = (count - size).clamp(min=1)
    # No output depends on what is subtracted from all of a group, so no gradient does.
    x = zero_masked(x - first.mean(dim=2, keepdim=True).detach(), real)
    total = x.sum(dim=2)  # (N, G, T)
    mean = total.cumsum(dim=-1) / count
    # The minus on the smaller tensor: the backward of a difference has it on the larger.
    centred = zero_masked(x + (-mean).unsqueeze(2), real)
    steps = torch.linalg.vecdot(centred, centred, dim=2)
    if size == 1:  # sum(c)^2 is sum(c^2)
        steps = steps * (count / before)
    else:
        moved = total - size * mean
        moved = moved if real is None else torch.where(real, moved, 0)
        steps = steps + moved.square() / before
    return centred, steps.cumsum(dim=-1) / count
