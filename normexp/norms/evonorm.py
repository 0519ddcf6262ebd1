"""EvoNorm B0 and S0: norm and nonlinearity in one layer, found by a search (arXiv:2004.02967)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm, refuse_one_value
from normexp.norms.group import GroupsPolicy, fit_groups
from normexp.norms.moments import Moments, pool
from normexp.norms.none import in_dtype_of
from normexp.norms.site import widen


class EvoNormB0(BatchNorm):
    """x / max(sqrt(var_batch + eps), v * x + sqrt(var_own + eps)) * weight + bias.

    Shape (N, C, *) in and out, statistics in float32 or wider. Both variances are biased and per
    channel: var_batch over all samples and positions, in evaluation the running average of its
    unbiased form; var_own over the positions of the sample, zero where there is one. It contains
    its nonlinearity: no activation should follow. `v` (C,) begins at 1. arXiv:2004.02967.

    The running mean is not used to normalize; it makes merged parts of a step exact. timm's
    EvoNorm2dB0 computes the same, keeps no running mean, and has eps 1e-3; the paper has 1e-5.

    Args:
        momentum: weight of the new value in the running averages; None averages all steps equally.

    Raises:
        UserError: momentum outside (0, 1]; or, in forward, one value per channel to pool.
    """

    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.v = nn.Parameter(torch.ones(num_features))

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={affine}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.forward_groups(x[None], None if mask is None else mask[None])[0]

    def forward_groups(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Training with statistics per group, x (G, N, C, *) and mask (G, N, *).

        The running averages move once, by the moments of all values of all groups together.
        """
        if x.numel() == 0:
            return x  # no sample, no moments
        if self.training:
            refuse_one_value(x.shape[1:])
        wide, real = _with_one_positions_axis(x, mask, channel_axis=2)
        own = _moments(wide, real, dims=(3,))
        var = self._batch_variance(own)[:, None, :, None]  # (G, 1, C, 1)
        scale = self.v.to(wide.dtype)[:, None] * wide + torch.sqrt(own.var + self.eps)
        of_batch = torch.sqrt(var + self.eps)
        # Not torch.maximum: its backward, which halves ties, takes several times as long.
        out = wide / torch.where(scale < of_batch, of_batch, scale)
        return _finish(out, real, self.weight, self.bias).reshape(x.shape).to(x.dtype)

    def _batch_variance(self, own: Moments) -> Tensor:
        """Per group (G, C), or (1, C) in evaluation, from the moments (G, N, C, 1) of samples."""
        if not self.training:
            return self.running_var.to(own.var.dtype)[None]
        count = own.count
        by_sample = Moments(
            own.mean.squeeze(3).movedim(1, 0),
            own.var.squeeze(3).movedim(1, 0),
            count.squeeze(3).movedim(1, 0) if isinstance(count, Tensor) else count,
        )
        groups = pool(by_sample)
        self._advance(pool(groups))
        return groups.var


class EvoNormS0(nn.Module):
    """x * sigmoid(v * x) / sqrt(var + eps) * weight + bias, var over C/G channels and positions.

    Shape (N, C, *) in and out, statistics in float32 or wider; x is not centred. The channels of a
    sample fall into `num_groups` runs of C/G. It contains its nonlinearity: no activation should
    follow. `v` (C,) begins at 1. arXiv:2004.02967; timm's EvoNorm2dS0 computes the same, with 32
    groups as in the paper, and so does its S0a, with eps 1e-3. Some code has the unbiased variance.

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
        self.v = nn.Parameter(torch.ones(num_features))
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
        if x.numel() == 0:
            return x  # no sample, no moments
        wide, real = _with_one_positions_axis(x, mask, channel_axis=1)
        gated = wide * torch.sigmoid(self.v.to(wide.dtype)[:, None] * wide)
        by_group = (self.num_groups, -1)
        real_groups = None if real is None else real.unsqueeze(2)  # (N, 1, 1, P)
        var = _moments(wide.unflatten(1, by_group), real_groups, dims=(2, 3)).var
        out = gated.unflatten(1, by_group) * torch.rsqrt(var + self.eps)
        return _finish(out.flatten(1, 2), real, self.weight, self.bias).reshape(x.shape).to(x.dtype)


def _with_one_positions_axis(
    x: Tensor, mask: Tensor | None, channel_axis: int
) -> tuple[Tensor, Tensor | None]:
    """x (..., C, *) widened, as (..., C, P), zero where masked; and the mask as (..., 1, P)."""
    wide = widen(x).flatten(channel_axis + 1) if x.ndim > channel_axis + 1 else widen(x)[..., None]
    if mask is None:
        return wide, None
    real = mask.flatten(channel_axis) if mask.ndim > channel_axis else mask[..., None]
    real = real.unsqueeze(-2)
    return torch.where(real, wide, 0), real


def _moments(x: Tensor, real: Tensor | None, dims: tuple[int, ...]) -> Moments:
    """Over `dims`, kept with size 1, of the values where `real`; `x` is zero elsewhere."""
    if real is None:
        var, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
        return Moments(mean, var, math.prod([x.shape[dim] for dim in dims]))
    count = real.expand(x.shape).sum(dim=dims, keepdim=True).to(x.dtype)
    safe = count.clamp(min=1)  # a sample of padding alone: 0 / 1
    mean = x.sum(dim=dims, keepdim=True) / safe
    centred = torch.where(real, x - mean, 0)
    return Moments(mean, centred.square().sum(dim=dims, keepdim=True) / safe, count)


def _finish(x: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x (..., C, P) times weight plus bias, zero where it is not real."""
    weight, bias = in_dtype_of(x, weight), in_dtype_of(x, bias)
    if weight is not None and bias is not None:
        x = x * weight[:, None] + bias[:, None]
    return x if real is None else torch.where(real, x, 0)
