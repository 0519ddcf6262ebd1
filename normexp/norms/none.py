"""No norm, the baseline of every comparison, and the small steps that all norms share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.norms.site import over_channels


class NoNorm(nn.Module):
    """y = x, without parameters. Shape (N, C, *) in and out; masked positions come back as zero."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def extra_repr(self) -> str:
        return f"{self.num_features}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return zero_masked(x, mask)


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` (N, C, *) with zeros where `mask` (N, *) is false, whatever was there, NaN included.

    Norms do this before any arithmetic: 0 * NaN would reach a gradient.
    """
    return x if mask is None else torch.where(mask.unsqueeze(1), x, 0)


def in_dtype_of(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    """`parameter` in the dtype of `x`: the kernels want one dtype for both."""
    if parameter is None or parameter.dtype == x.dtype:
        return parameter
    return parameter.to(x.dtype)


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x (N, C, *) times weight (C,) plus bias (C,), in the dtype of `x`; without them `x`."""
    if weight is None or bias is None:
        return x
    return x * over_channels(weight.to(x.dtype), x) + over_channels(bias.to(x.dtype), x)
