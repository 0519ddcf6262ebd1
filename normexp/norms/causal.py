"""Instance and group normalization for text: at each position, moments of the positions so far."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.contract import widen
from normexp.norms.group import GroupNorm
from normexp.norms.instance import InstanceNorm
from normexp.norms.none import scale_and_shift, zero_masked


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

    With c the K values of position s less the mean up to it, a group's squared deviations grow there
    by sum(c^2), and by sum(c)^2 / (number of values before s) as the mean has moved for those before
    (after Chan, Golub and LeVeque 1979).

    Accuracy: no term is negative, so no digits cancel. Sums are of differences from the first real
    value, so that a constant added to a sequence costs none beyond those its own rounding takes.
    """
    if x.ndim > 3:
        raise UserError(
            f"a causal norm needs one positions axis (N, C, T), and an input of shape "
            f"{tuple(x.shape)} has {x.ndim - 2}; try norm=group or norm=instance"
        )
    wide = zero_masked(widen(x), mask)
    groups = wide.view(*x.shape[:2], -1).unflatten(1, (num_groups, -1))  # (N, G, C/G, T)
    num_channels, num_positions = groups.shape[2:]
    if mask is None:
        real, first = None, groups[..., :1]
        count = torch.arange(1, num_positions + 1, dtype=wide.dtype, device=x.device)
    else:
        real = mask.view(-1, 1, num_positions)  # (N, 1, T)
        first = groups.take_along_dim(real.int().argmax(dim=-1)[:, None, None], dim=-1)
        count = real.cumsum(dim=-1).clamp(min=1).to(wide.dtype)  # before the first real one: 0 / 1
    count = count * num_channels  # of values up to a position
    before = (count - num_channels).clamp(min=1)  # at the first one 0 / 1
    # No output depends on what is subtracted from all of a group, so no gradient does.
    groups = zero_masked(groups - first.mean(dim=2, keepdim=True).detach(), real)
    total = groups.sum(dim=2)  # (N, G, T)
    mean = total.cumsum(dim=-1) / count
    # The sign on the smaller tensor: in the backward of a difference it is on the larger.
    centred = zero_masked(groups + (-mean).unsqueeze(2), real)
    steps = torch.linalg.vecdot(centred, centred, dim=2)
    if num_channels == 1:  # the same, where sum(c)^2 is sum(c^2)
        steps = steps * (count / before)
    else:
        moved = total - num_channels * mean
        moved = moved if real is None else torch.where(real, moved, 0)
        steps = steps + moved.square() / before
    var = steps.cumsum(dim=-1) / count
    out = (centred * torch.rsqrt(var + eps).unsqueeze(2)).flatten(1, 2).view(x.shape)
    return zero_masked(scale_and_shift(out, weight, bias), mask).to(x.dtype)
