"""Instance and group normalization for text: at each position, moments of the positions so far."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.contract import over_channels, widen
from normexp.norms.group import GroupNorm
from normexp.norms.instance import InstanceNorm
from normexp.norms.none import in_dtype_of, zero_masked


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

    Accuracy: sums are of differences from the first real value, and variances sums of squares, so
    that a constant added to a sequence costs no digits beyond those its own rounding takes.
    """
    if x.ndim > 3:
        raise UserError(
            f"a causal norm needs one positions axis (N, C, T), and an input of shape "
            f"{tuple(x.shape)} has {x.ndim - 2}; try norm=group or norm=instance"
        )
    wide = zero_masked(widen(x), mask)
    groups = wide.view(*x.shape[:2], -1).unflatten(1, (num_groups, -1))  # (N, G, C/G, T)
    shape = (x.shape[0], groups.shape[-1])
    real = x.new_ones(shape, dtype=torch.bool) if mask is None else mask.view(shape)
    first = real.int().argmax(dim=-1)[:, None, None, None]
    # No output depends on what is subtracted from all of a group, so no gradient does.
    reference = groups.take_along_dim(first, dim=-1).mean(dim=2, keepdim=True).detach()
    groups = torch.where(real[:, None, None], groups - reference, 0)
    mean, var = _prefix_moments(groups, real.unsqueeze(1))
    out = (groups - mean.unsqueeze(2)) * torch.rsqrt(var + eps).unsqueeze(2)
    out = out.flatten(1, 2).view(x.shape)
    weight, bias = in_dtype_of(out, weight), in_dtype_of(out, bias)
    if weight is not None and bias is not None:
        out = out * over_channels(weight, out) + over_channels(bias, out)
    return zero_masked(out, mask).to(x.dtype)


def _prefix_moments(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (N, G, T) of x (N, G, K, T) over K and the real positions s <= t.

    With b_s and v_s the mean and variance of position s over K, and n_s the number of positions up
    to it, mean_t = sum b_s / n_t, var_t = sum (v_s + (n_s - 1) / n_s * (b_s - mean_{s-1})^2) / n_t
    (Chan, Golub and LeVeque 1979). No term is negative, so no digits cancel; x is zero where `real`
    (N, 1, T) is false.
    """
    count = real.cumsum(dim=-1).to(x.dtype)
    safe = count.clamp(min=1)  # positions before the first real one: 0 / 1
    mean = x.mean(dim=2)
    prefix_mean = mean.cumsum(dim=-1) / safe
    mean_before = F.pad(prefix_mean[..., :-1], (1, 0))
    share = torch.where(real, (count - 1) / safe, 0)
    steps = share * (mean - mean_before).square()
    if x.shape[2] > 1:  # a channel by itself has no variance at a position
        steps = steps + (x - mean.unsqueeze(2)).square().mean(dim=2)
    return prefix_mean, steps.cumsum(dim=-1) / safe
