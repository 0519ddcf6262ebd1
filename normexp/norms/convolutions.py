"""Convolutions whose weights are standardised in every forward: weights (O, I, K, K) per filter O.

The stored weight is free, and its scale and mean have no effect. Nothing depends on the inputs, so
a layer is the same in training and in evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.slots import Conv

# In squared units of weights. The config's eps has those of activations, which are far larger: at
# 1e-5 it would shrink the filters of a wide layer, whose variance is 2 / fan_in, by a percent.
WEIGHT_EPS = 1e-6


def standardize(weight: Tensor) -> Tensor:
    """(weight - mean) / sqrt(var + 1e-6) over all axes but the first, var biased."""
    axes = tuple(range(1, weight.ndim))
    var, mean = torch.var_mean(weight, dim=axes, correction=0, keepdim=True)  # (O, 1, 1, 1)
    return (weight - mean) * torch.rsqrt(var + WEIGHT_EPS)


class WeightStandardizedConv2d(nn.Conv2d):
    """Convolution with (w - mean) / sqrt(var + eps) per filter.

    Qiao et al. 2019, arXiv:1903.10520; var is biased and eps, here 1e-6, under the root. timm's
    StdConv2d is the same; the authors' code (joe-siyuan-qiao/WeightStandardization) takes the
    unbiased standard deviation and adds 1e-5 to it. A filter has variance 1 and not 1 / fan_in, so
    that outputs grow by the root of fan_in: a norm is meant to follow. Shapes as nn.Conv2d:
    (N, I, H, W) -> (N, O, H', W').
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)

    def filters(self) -> Tensor:
        """The weights (O, I, K, K) that the convolution takes."""
        return standardize(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filters(), self.bias, self.stride, self.padding)


class ScaledWeightStandardizedConv2d(WeightStandardizedConv2d):
    """Convolution with gain * (w - mean) / sqrt(fan_in * (var + eps)) per filter.

    Brock et al. 2021, arXiv:2101.08692: white inputs keep their variance with no norm behind.
    `gain` (O) is learned, starts at one and counts as a norm's parameter for weight decay; that of
    the nonlinearity is not here but in act=scaled_relu. timm's ScaledStdConv2d is the same; the
    authors' code bounds fan_in * var from below by 1e-4 in place of an eps. Options as the base's.
    """

    norm_parameters = ("gain",)

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, **options: Any
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, **options)
        self.gain = nn.Parameter(torch.ones(out_channels))

    def filters(self) -> Tensor:
        fan_in = self.weight[0].numel()
        scale = self.gain * fan_in**-0.5  # (O)
        return scale.view(-1, 1, 1, 1) * standardize(self.weight)


CONVOLUTIONS: dict[Conv, type[nn.Conv2d]] = {
    "plain": nn.Conv2d,
    "weight_standardized": WeightStandardizedConv2d,
    "scaled_weight_standardized": ScaledWeightStandardizedConv2d,
}
