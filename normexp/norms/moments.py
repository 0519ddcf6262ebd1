"""Normalizing by the moments of a batch, or of each group of its samples, and pooling moments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normexp.norms.site import over_channels

# Groups with more elements than this run one after another: a loop saves the two copies of a fold,
# and on a CPU that is worth more than the calls it adds from about here on.
_LOOP_FROM_ELEMENTS = 2**16


class Moments(NamedTuple):
    """Mean, biased variance, and how many values they are of: (C,) each, or (G, C) by group.

    The number is one integer unless it depends on a mask.
    """

    mean: Tensor
    var: Tensor
    count: int | Tensor


def normalize_batch(
    x: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Moments]:
    """Output and moments of x (N, C, *), zero where `real`, shaped to broadcast to it, is false."""
    if real is None:
        out, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        return out, Moments(mean.detach(), _variance(scale, eps), x.numel() // x.shape[1])
    pooled = (0, *range(2, x.ndim))
    count = real.sum(dim=pooled).to(x.dtype)  # (C,), or (1,) where channels share a mask
    safe = count.clamp(min=1)
    mean = x.sum(dim=pooled) / safe
    centred = torch.where(real, x - over_channels(mean, x), 0)
    var = centred.square().sum(dim=pooled) / safe
    out = centred * over_channels(torch.rsqrt(var + eps), x)
    if weight is not None:
        out = out * over_channels(weight, x)
    if bias is not None:
        out = out + over_channels(bias, x)
    return out, Moments(mean.detach(), var.detach(), count)


def normalize_groups(
    x: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Moments]:
    """Output and moments by group of x (G, N, C, *), as `normalize_batch` of each group."""
    num_groups, _, num_channels = x.shape[:3]
    if num_groups == 1:
        own = None if real is None else real.squeeze(0)
        out, (mean, var, count) = normalize_batch(x.squeeze(0), own, weight, bias, eps)
        count = count[None] if isinstance(count, Tensor) else count
        return out[None], Moments(mean[None], var[None], count)
    if real is None and loops_over_groups(x.shape):
        rest = (weight, bias, None, None, True, 0.0, eps)
        parts = [torch.native_batch_norm(part, *rest) for part in x]
        out, means, scales = (torch.stack(values) for values in zip(*parts, strict=True))
        return out, Moments(means.detach(), _variance(scales, eps), x[0].numel() // num_channels)
    if real is not None:
        real = real.expand(-1, -1, num_channels, *real.shape[3:]).movedim(0, 1).flatten(1, 2)
    folded = x.movedim(0, 1).flatten(1, 2)  # a group's channels stand as channels of their own
    weight = None if weight is None else weight.repeat(num_groups)
    bias = None if bias is None else bias.repeat(num_groups)
    out, (mean, var, count) = normalize_batch(folded, real, weight, bias, eps)
    by_group = (num_groups, num_channels)
    if isinstance(count, Tensor):
        count = count.unflatten(0, by_group)
    moments = Moments(mean.unflatten(0, by_group), var.unflatten(0, by_group), count)
    return out.unflatten(1, by_group).movedim(1, 0), moments


def _variance(scale: Tensor, eps: float) -> Tensor:
    """The variance in the kernel's scale, 1 / sqrt(var + eps)."""
    return (scale.detach().pow(-2) - eps).clamp(min=0)


def loops_over_groups(shape: torch.Size) -> bool:
    """Whether groups of x (G, N, C, *) run one after another rather than folded into channels."""
    return shape[1:].numel() > _LOOP_FROM_ELEMENTS


def zero_masked_groups(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` (G, N, C, *) with zeros where mask (G, N, *) is false, as `zero_masked`."""
    return x if mask is None else torch.where(mask.unsqueeze(2), x, 0)


def pool(groups: Moments) -> Moments:
    """Moments of all groups' values together, the variance within groups and between them."""
    means, variances, counts = groups
    num_groups = len(means)
    if num_groups == 1:
        count = counts[0] if isinstance(counts, Tensor) else counts
        return Moments(means[0], variances[0], count)
    if isinstance(counts, Tensor):
        total = counts.sum(dim=0)
        weights = counts / total.clamp(min=1)
    else:
        total, weights = counts * num_groups, 1 / num_groups
    mean = (weights * means).sum(dim=0)
    var = (weights * (variances + (means - mean).square())).sum(dim=0)
    return Moments(mean, var, total)


def unbiased(var: Tensor, count: int | Tensor) -> Tensor:
    """A biased variance over `count` values times n / (n - 1); nothing to correct below two."""
    fewer = (count - 1).clamp(min=1) if isinstance(count, Tensor) else count - 1
    return var * (count / fewer)
