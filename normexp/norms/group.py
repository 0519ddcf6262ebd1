"""Group normalization, and the pooling within a sample that layer and instance norm share."""

from __future__ import annotations

import logging
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.none import in_dtype_of, zero_masked
from normexp.norms.site import over_channels, widen

logger = logging.getLogger(__name__)

GroupsPolicy = Literal["strict", "nearest"]


class GroupNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, moments over C/G channels and all positions.

    Shape (N, C, *) in and out, an affine per channel, statistics in float32 or wider; torch.nn's
    GroupNorm. The channels of a sample fall into `num_groups` runs of C/G. arXiv:1803.08494, where
    G is 32. Public ones differ in the order of their arguments, torch's taking G first, and on
    tokens: with the positions among what is pooled, as in torch on (N, C, T), or each token alone.

    Args:
        num_groups: G.
        groups_policy: where G does not divide C, `strict` refuses and `nearest` takes the nearest
            divisor and logs it.

    Raises:
        UserError: G does not divide C; or, in forward, C/G * positions is one value.
    """

    def __init__(
        self,
        num_features: int,
        *,
        num_groups: int,
        eps: float = 1e-5,
        affine: bool = True,
        groups_policy: GroupsPolicy = "strict",
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_groups = fit_groups(num_features, num_groups, groups_policy)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.num_features}, groups={self.num_groups}, eps={self.eps}, affine={affine}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.num_features // self.num_groups * x.shape[2:].numel() == 1:
            raise UserError(
                f"num_groups={self.num_groups} leaves one value per group for an input of shape "
                f"{tuple(x.shape)}; try a smaller norm.num_groups"
            )
        return normalize_within_samples(
            x, mask, self.num_groups, self.weight, self.bias, eps=self.eps
        )


def fit_groups(num_features: int, num_groups: int, policy: GroupsPolicy) -> int:
    """The number of groups to use: `num_groups`, or by policy `nearest` a divisor close to it.

    Of two divisors equally near the smaller is taken; C itself never is, as it would leave a token
    one value per group.
    """
    if policy not in ("strict", "nearest"):
        raise UserError(f"norm.groups_policy={policy} is neither strict nor nearest")
    if num_groups < 1:
        raise UserError(f"num_groups={num_groups} is not positive; try norm.num_groups=1")
    if num_features % num_groups == 0:
        return num_groups
    divisors = [d for d in range(1, num_features + 1) if num_features % d == 0]
    if policy == "strict":
        around = [
            *[d for d in divisors if d < num_groups][-1:],
            *[d for d in divisors if d > num_groups][:1],
        ]
        choices = " or ".join(map(str, around))
        raise UserError(
            f"num_groups={num_groups} does not divide num_features={num_features}; "
            f"try norm.num_groups={choices}, or norm.groups_policy=nearest"
        )
    nearest = min(divisors[:-1] or [1], key=lambda d: abs(d - num_groups))
    logger.info(
        "num_groups=%d does not divide num_features=%d: using %d", num_groups, num_features, nearest
    )
    return nearest


def normalize_within_samples(
    x: Tensor,
    mask: Tensor | None,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
) -> Tensor:
    """Normalizes each group of channels of each sample by its own moments over real positions.

    Shapes: x (N, C, *), mask (N, *), weight and bias (C,) -> (N, C, *).
    """
    wide = zero_masked(widen(x), mask)
    weight, bias = in_dtype_of(wide, weight), in_dtype_of(wide, bias)
    if mask is None or x.ndim == 2:  # a sample of one position is real or padding as a whole
        out = F.group_norm(wide, num_groups, weight, bias, eps)
    else:
        out = _masked_group_norm(wide, mask, num_groups, eps)
        if weight is not None:
            out = out * over_channels(weight, out)
        if bias is not None:
            out = out + over_channels(bias, out)
    return zero_masked(out, mask).to(x.dtype)


def _masked_group_norm(x: Tensor, mask: Tensor, num_groups: int, eps: float) -> Tensor:
    """The plain formula, with shapes that do not depend on the mask; `x` is zero where masked."""
    groups = x.unflatten(1, (num_groups, -1))  # (N, G, C/G, *)
    real = mask[:, None, None]  # (N, 1, 1, *)
    pooled = tuple(range(2, groups.ndim))
    count = real.sum(dim=pooled, keepdim=True) * groups.shape[2]
    count = count.clamp(min=1)  # a sample without a real position: 0 / 1
    mean = groups.sum(dim=pooled, keepdim=True) / count
    centred = torch.where(real, groups - mean, 0)
    var = centred.square().sum(dim=pooled, keepdim=True) / count
    return (centred * torch.rsqrt(var + eps)).flatten(1, 2)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, moments over C and all positions of a sample.

    Shape (N, C, *) in and out, an affine per channel, statistics in float32 or wider. On (N, C) it
    is torch.nn.LayerNorm(C); with positions, torch.nn.GroupNorm with one group. arXiv:1607.06450.
    Public ones for maps differ in what they pool, (C, H, W) as here or C alone (`LayerNorm2d`), and
    torch.nn.LayerNorm([C, H, W]) has a weight and a bias per value, not per channel.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim == 2:
            return _normalize_channels(x, mask, self.weight, self.bias, eps=self.eps)
        return normalize_within_samples(x, mask, 1, self.weight, self.bias, eps=self.eps)


class LayerNorm2d(LayerNorm):
    """Layer norm with moments over C alone, at each position.

    Shape (N, C, *) in and out: torch.nn.LayerNorm(C) on the channels-last view, as ConvNeXt has it
    for maps (arXiv:2201.03545) and transformers for tokens. Positions never mix.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return _normalize_channels(x, mask, self.weight, self.bias, eps=self.eps)


def _normalize_channels(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    wide = zero_masked(widen(x), mask).movedim(1, -1)  # (N, *, C)
    weight, bias = in_dtype_of(wide, weight), in_dtype_of(wide, bias)
    out = F.layer_norm(wide, (wide.shape[-1],), weight, bias, eps).movedim(-1, 1)
    return zero_masked(out, mask).to(x.dtype)


class InstanceNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, moments over the positions of one channel.

    Shape (N, C, *) in and out with more than one position, statistics in float32 or wider, in
    training and evaluation alike. arXiv:1607.08022. torch.nn's InstanceNorm has no affine unless
    told, where this one and many tutorials have one per channel; with track_running_stats it
    evaluates by averages over the training samples, which is not done here.

    Raises:
        UserError: the input has one position.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[2:].numel() == 1:
            raise UserError(
                f"instance norm needs positions to pool, and an input of shape {tuple(x.shape)} "
                "has one; try norm=layer or norm=group, or norm.view=sequence for tokens"
            )
        return normalize_within_samples(
            x, mask, self.num_features, self.weight, self.bias, eps=self.eps
        )


class PositionNorm(LayerNorm2d):
    """(x - mean) / sqrt(var + eps), moments over C at each position; PONO. arXiv:1907.04312.

    Shape (N, C, *) in and out, statistics in float32 or wider. It is `LayerNorm2d` without an
    affine. The paper divides by C in the variance; the authors' code takes torch's unbiased
    variance, over C - 1: its output is smaller by sqrt((C - 1) / C). In the paper the moments are
    moreover handed to a later layer (moment shortcut), which is part of a model and not of a norm.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps=eps, affine=False)
