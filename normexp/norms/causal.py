"""Instance and group norm for text: each position uses the moments of itself and earlier ones."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.affine import Affine, AffineNorm
from normexp.norms.group import ChannelGroupsNorm, refuse_one_position
from normexp.norms.moments import zero_padding


class CausalGroupNorm(ChannelGroupsNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments over C/G channels and s <= t.

    Shape (N, C, T) in and out, or (N, C), which is one position. The last position equals group
    norm over the whole sequence; with G = C this is `CausalInstanceNorm`. The groups of
    arXiv:1803.08494, cumulative like cLN of Conv-TasNet (arXiv:1809.07454), which is G = 1.
    """

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        if self.training:
            self.refuse_one_value(x)
        return normalize_prefixes(x, real, self.num_groups, affine, self.eps)


class CausalInstanceNorm(AffineNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments of one channel over s <= t.

    Shape (N, C, T) in and out. Instance norm of arXiv:1607.08022 on each prefix. The first real
    position of a sample pools one value, so its variance is 0 and its output is always the bias.
    Sequences of one position are therefore refused in training; in evaluation a text may start
    with one.
    """

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        if self.training or x.ndim == 2:
            refuse_one_position(x.shape, "causal instance norm", "norm=causal_group")
        return normalize_prefixes(x, real, self.num_features, affine, self.eps)


def normalize_prefixes(
    x: Tensor, real: Tensor | None, num_groups: int, affine: Affine, eps: float
) -> Tensor:
    """Normalizes each position by its group's moments over the real positions up to it.

    Shapes: x (N, C, T) or (N, C), real (N, 1, T) or (N, 1).
    """
    if x.ndim > 3:
        raise UserError(
            f"a causal norm needs one axis of positions (N, C, T), and an input of shape "
            f"{tuple(x.shape)} has {x.ndim - 2}; try norm=group or norm=instance"
        )
    groups = x.view(*x.shape[:2], -1).unflatten(1, (num_groups, -1))  # (N, G, C/G, T)
    real = None if real is None else real.view(len(x), 1, -1)  # (N, 1, T)
    centred, var = _centre_prefixes(groups, real)
    out = centred * torch.rsqrt(var + eps).unsqueeze(2)
    return affine.apply(out.flatten(1, 2).view(x.shape))


def _centre_prefixes(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns x_t - mean_t and the biased var_t over K and the real positions s <= t.

    Shapes: x (N, G, K, T), zero where `real` (N, 1, T) is false -> (N, G, K, T) and (N, G, T).

    With c_s the centred values at s, a group's sum of squared deviations grows there by sum(c_s^2),
    and by sum(c_s)^2 / (number of values before s), because the mean has moved for the values
    before (after Chan, Golub and LeVeque 1979).

    Accuracy: no term is negative, so no digits cancel. Sums are of differences from the first real
    value, so that a constant added to a sequence costs only the digits that its own rounding takes.
    """
    size, num_positions = x.shape[2:]  # K, T
    mask = None if real is None else real.unsqueeze(1)  # (N, 1, 1, T)
    if real is None:
        first = x[..., :1]
        count = torch.arange(1, num_positions + 1, dtype=x.dtype, device=x.device)
    else:
        first = x.take_along_dim(real.int().argmax(dim=-1)[:, None, None], dim=-1)
        count = real.cumsum(dim=-1).clamp(min=1).to(x.dtype)  # before the first real one: 0 / 1
    count = count * size  # of values up to a position
    before = (count - size).clamp(min=1)
    # No output depends on a constant subtracted from a whole group, so neither does a gradient.
    x = zero_padding(x - first.mean(dim=2, keepdim=True).detach(), mask)
    total = x.sum(dim=2)  # (N, G, T)
    mean = total.cumsum(dim=-1) / count
    # Negates the smaller tensor: the backward of a difference would negate the larger one.
    centred = zero_padding(x + (-mean).unsqueeze(2), mask)
    with torch.autocast(x.device.type, enabled=False):  # it would round to half precision
        steps = torch.linalg.vecdot(centred, centred, dim=2)
    if size == 1:  # sum(c)^2 is sum(c^2)
        steps = steps * (count / before)
    else:
        steps = steps + zero_padding(total - size * mean, real).square() / before
    return centred, steps.cumsum(dim=-1) / count
