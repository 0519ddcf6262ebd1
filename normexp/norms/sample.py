"""Norms that pool within a sample: group, layer, instance, positional and RMS norm; and none.

All but RMS norm, which does not centre, are (x - mean) / sqrt(var + eps) * weight + bias with the
biased variance. They differ in the values that the moments pool, for x (N, C, H, W):

    GroupNorm      each run of C / num_groups channels, over H and W     nn.GroupNorm
    LayerNorm      all of a sample: C, H, W                              nn.GroupNorm(1, C)
    InstanceNorm   one channel of a sample, over H and W                 nn.InstanceNorm2d
    LayerNorm2d    one position of a sample, over C                      nn.LayerNorm, channels last
    PositionNorm   as LayerNorm2d, without weight and bias
    RMSNorm        one position of a sample, over C                      nn.RMSNorm, channels last

On (N, C), the shape of tokens in view=token, there is a single position: layer norm is
nn.LayerNorm(C), and instance norm has nothing to pool.
"""

from __future__ import annotations

import logging
from dataclasses import field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms import kernel
from normexp.norms.base import (
    Affine,
    AffineNorm,
    centre,
    knobs,
    measure,
    unbiased,
    zero_padding,
)
from normexp.norms.contract import Mask

logger = logging.getLogger(__name__)


@knobs
class ChannelGroupsNorm(AffineNorm):
    """Abstract: a norm over `num_groups` runs of neighbouring channels.

    Args:
        groups_policy: what to do if num_groups does not divide num_features: `strict` refuses;
            `nearest` takes the nearest divisor, the smaller of two, and logs it. It never takes
            num_features, which would leave one value per group of a token.
    """

    num_groups: int
    groups_policy: Literal["strict", "nearest"] = "strict"

    def check_knobs(self) -> None:
        self.require_positive("num_groups", 1)
        if self.groups_policy not in ("strict", "nearest"):
            raise UserError(
                f"norm.groups_policy={self.groups_policy} is neither strict nor nearest"
            )
        num_features = self.num_features
        if num_features % self.num_groups == 0:
            return
        divisors = [d for d in range(1, num_features) if num_features % d == 0] or [1]
        nearest = min(divisors, key=lambda d: abs(d - self.num_groups))
        misfit = f"num_groups={self.num_groups} does not divide num_features={num_features}"
        if self.groups_policy == "strict":
            raise UserError(
                f"{misfit}; try norm.num_groups={nearest}, or norm.groups_policy=nearest"
            )
        logger.info("%s: using %d", misfit, nearest)
        self.num_groups = nearest

    def refuse_one_value(self, x: Tensor) -> None:
        """Raises UserError if a group of x (N, C, *) holds one value: its variance is zero."""
        if self.num_features // self.num_groups * x.shape[2:].numel() == 1:
            raise UserError(
                f"num_groups={self.num_groups} leaves one value per group for an input of shape "
                f"{tuple(x.shape)}; try a smaller norm.num_groups"
            )


class GroupNorm(ChannelGroupsNorm):
    """Moments over C / num_groups channels and all positions of a sample. arXiv:1803.08494.

    The paper has 32 groups. torch takes num_groups as the first argument, and on (N, C, T) pools
    positions too.
    """

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        self.refuse_one_value(x)
        return group_norm(x, real, self.num_groups, affine, self.eps)


class LayerNorm(AffineNorm):
    """Moments over all channels and positions of a sample. arXiv:1607.06450.

    Other implementations for maps differ in what they pool: (C, H, W) as here, or C alone as
    `LayerNorm2d`; torch.nn.LayerNorm([C, H, W]) has a weight and a bias per value.
    """

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if x.ndim == 2:
            return F.layer_norm(x, x.shape[1:], *affine, self.eps)
        return group_norm(x, real, 1, affine, self.eps)


@knobs
class InstanceNorm(AffineNorm):
    """Moments over the positions of one channel of a sample. arXiv:1607.08022.

    torch.nn's InstanceNorm has no weight and bias by default; this one, as in many tutorials, has
    both per channel.

    Args:
        track_running_stats: evaluate by running averages, over the samples of training, of each
            sample's mean and unbiased variance, as torch's does. Setting it to False later freezes
            them.
        momentum: weight of the new value in these averages.
    """

    track_running_stats: bool = False
    momentum: float = 0.1
    running_mean: Tensor | None = field(init=False)
    running_var: Tensor = field(init=False)
    num_batches_tracked: Tensor = field(init=False)

    def check_knobs(self) -> None:
        if self.momentum is None or not 0 < self.momentum <= 1:
            raise UserError(f"momentum={self.momentum} is not in (0, 1]; try norm.momentum=0.1")
        if self.momentum != type(self).momentum and not self.track_running_stats:
            raise UserError(
                f"momentum={self.momentum} has no effect without averages; drop it, or add "
                "norm.track_running_stats=true"
            )

    def add_state(self) -> None:
        state = {"running_mean": self.vector(0), "running_var": self.vector(1)}
        state["num_batches_tracked"] = torch.tensor(0)
        for name, start in state.items():
            self.register_buffer(name, start if self.track_running_stats else None)

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if self.running_mean is not None and not self.training:
            averages = (self.running_mean.to(x.dtype), self.running_var.to(x.dtype))
            return kernel.batch_norm(x, affine, averages, None, self.eps)
        refuse_one_position(x.shape, "instance norm", "norm=layer or norm=group")
        if self.running_mean is not None and self.track_running_stats:
            self.advance(x, real)
        return group_norm(x, real, self.num_features, affine, self.eps)

    @torch.no_grad()
    def advance(self, x: Tensor, real: Mask) -> None:
        """Moves the averages by one step. Parts of a step merge as means over their samples."""
        mean, var, count = measure(x, real, tuple(range(2, x.ndim)))  # (N, C, 1, ...)
        new = {"running_mean": mean, "running_var": unbiased(var, count)}
        for name, value in new.items():
            average = getattr(self, name)
            of_samples = value.mean(dim=0).flatten().to(average.dtype)
            average.mul_(1 - self.momentum).add_(self.momentum * of_samples)
        self.num_batches_tracked.add_(1)


class LayerNorm2d(AffineNorm):
    """Moments over the channels at each position; positions never mix.

    torch.nn.LayerNorm(C) on the channels-last view: ConvNeXt's norm for maps (arXiv:2201.03545),
    and what transformers do with tokens.
    """

    def normalize(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        x = x.movedim(1, -1)  # (N, *, C)
        return F.layer_norm(x, (self.num_features,), *affine, self.eps).movedim(-1, 1)


@knobs
class PositionNorm(LayerNorm2d):
    """Moments over the channels at each position, without weight and bias: PONO. arXiv:1907.04312.

    The paper has the biased variance; the authors' code takes the unbiased one, over C - 1, which
    scales its output by sqrt((C - 1) / C). The paper's moment shortcut, which passes the moments to
    a later layer, belongs to a model and not to a norm.
    """

    affine: bool = field(default=False, init=False)


@knobs
class RMSNorm(AffineNorm):
    """x / sqrt(mean_C(x^2) + eps) * weight. Pools C at each position. arXiv:1910.07467.

    On (N, C) it is torch.nn.RMSNorm(C), whose default eps is 1.2e-7 in float32. Language models
    differ in whether they return to half precision before or after the weight; some store the
    weight less one, which is `zero_centered`.
    """

    has_bias: bool = False

    def normalize(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        if x.ndim == 2:  # torch's kernel wants channels last, which is slower for maps
            return F.rms_norm(x, (self.num_features,), affine.weight, self.eps)
        return affine.apply(x * inverse_rms(x, self.eps))


@knobs
class SimpleRMSNorm(RMSNorm):
    """x / sqrt(mean_C(x^2) + eps): RMS norm without parameters. arXiv:2307.14995.

    The paper has x * sqrt(C) / |x| without eps; implementations bound |x| from below by a small
    number instead. timm's SimpleNorm is another norm: it has a weight, and divides by the unbiased
    standard deviation over C without centring x.
    """

    affine: bool = field(default=False, init=False)


class NoNorm(nn.Module):
    """y = x, without parameters. Shape (N, C, *) in and out; padding becomes zero."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        return zero_padding(x, None if mask is None else mask.unsqueeze(1))


def group_norm(
    x: Tensor,
    real: Mask,
    num_groups: int,
    affine: Affine,
    eps: float,
) -> Tensor:
    """Normalizes each run of C / num_groups channels of each sample over its real positions.

    Computes by torch's kernel, or with a mask by the formula. Shapes: x (N, C, *), real (N, 1, *).
    """
    if real is None or x.ndim == 2:  # a sample of one position is real or padding as a whole
        if num_groups == x.shape[1]:
            # The kernel loses digits far from zero, twice as many as nn.InstanceNorm's. A constant
            # added to a whole channel changes no output, so it needs no gradient.
            x = x - x.detach().mean(dim=tuple(range(2, x.ndim)), keepdim=True)
        return kernel.group_norm(x, num_groups, affine, eps)
    groups = x.unflatten(1, (num_groups, -1))  # (N, G, C/G, *)
    real = real.unsqueeze(1)  # (N, 1, 1, *)
    mean, var, _ = measure(groups, real, tuple(range(2, groups.ndim)))
    out = centre(groups, mean, real) * torch.rsqrt(var + eps)
    return affine.apply(out.flatten(1, 2))


def refuse_one_position(shape: torch.Size, name: str, instead: str) -> None:
    """Raises UserError for an input of this shape (N, C, *) that has one position."""
    if shape[2:].numel() == 1:
        raise UserError(
            f"{name} pools positions, but an input of shape {tuple(shape)} has one; "
            f"try {instead}, or norm.view=sequence for tokens"
        )


def inverse_rms(x: Tensor, eps: float, *, axis: int = 1) -> Tensor:
    """Returns 1 / sqrt(mean_C(x^2) + eps) of x, the channels along `axis`, kept with size 1."""
    return torch.rsqrt(x.square().mean(dim=axis, keepdim=True) + eps)
