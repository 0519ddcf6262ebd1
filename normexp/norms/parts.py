"""Modules that slots put around a norm: activations, convolutions, scales of residual branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.base import Affine
from normexp.training.config.slots import Act, Conv

# Added to the variance of weights. The config's eps fits activations, which are far larger: at 1e-5
# it would shrink the filters of a wide layer, whose variance is 2 / fan_in, by a percent.
WEIGHT_EPS = 1e-6


class TLU(nn.Module):
    """max(x, tau) with a learned tau per channel, which starts at zero as ReLU.

    The activation of filter response norm, whose outputs are not centred (Singh and Krishnan 2020,
    arXiv:1911.09737). Shape (N, C, *) in and out.
    """

    norm_parameters = ("tau",)

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        tau = self.tau.view(-1, *[1] * (x.ndim - 2))  # float32: x widens to it
        # Equals torch.maximum, whose backward is slower; in this order a NaN in x is kept.
        return torch.where(x <= tau, tau, x).to(x.dtype)


class ScaledReLU(nn.Module):
    """1.714 * max(x, 0): variance 1 for x from a standard normal distribution.

    The activation of normalizer-free networks (Brock et al. 2021, arXiv:2101.08692), for scaled
    weight standardization. The gain is that of the authors' code and of timm, an estimate of
    sqrt(2 / (1 - 1 / pi)). Any shape.
    """

    GAIN = 1.7139588594436646

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * self.GAIN


class ProxyActivation(nn.Module):
    """(f(w x + b) - mean(f(w g + b))) / sqrt(var(f(w g + b)) + 0.03), g a standard normal variable.

    Proxy normalization of an activation f (Labatie et al. 2021, arXiv:2106.03743) standardizes what
    f would return if its normalized input had a normal distribution in each channel. The layer or
    group norm before it has affine=false, because weight and bias are here. As in public code, g
    takes the 256 midpoints of equal probabilities, and var is biased. Shape (N, C, *) in and out.
    """

    norm_parameters = ("weight", "bias")
    NUM_VALUES, EPS = 256, 0.03

    def __init__(self, num_features: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        affine = Affine(self.weight, self.bias)  # float32: x widens to it
        steps = torch.arange(self.NUM_VALUES, device=x.device, dtype=self.weight.dtype)
        normal = torch.special.ndtri((steps + 0.5) / self.NUM_VALUES)[:, None]
        proxy = self.function(affine.apply(normal.expand(-1, len(self.weight))))
        var, mean = torch.var_mean(proxy, dim=0, correction=0)  # (C,)
        scale = torch.rsqrt(var + self.EPS)
        x_wide = x.to(torch.promote_types(x.dtype, scale.dtype))
        y = self.function(affine.apply(x_wide))
        return Affine(scale, -mean * scale).apply(y).to(x.dtype)


class WeightStandardizedConv2d(nn.Conv2d):
    """Convolution with (w - mean) / sqrt(var + 1e-6) per filter, over weights (O, I, K, K).

    Qiao et al. 2019, arXiv:1903.10520; var is biased. timm's StdConv2d is the same; the authors'
    code (joe-siyuan-qiao/WeightStandardization) takes the unbiased standard deviation and adds 1e-5
    to it. A filter has variance 1 and not 1 / fan_in, so outputs grow by the root of fan_in: a norm
    should follow. Shapes as nn.Conv2d: (N, I, H, W) -> (N, O, H', W').
    """

    def filters(self) -> Tensor:
        """Returns the weights (O, I, K, K) that the convolution applies."""
        dims = tuple(range(1, self.weight.ndim))
        var, mean = torch.var_mean(self.weight, dim=dims, correction=0, keepdim=True)  # (O, 1...)
        return (self.weight - mean) * torch.rsqrt(var + WEIGHT_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.filters(), self.bias)


class ScaledWeightStandardizedConv2d(WeightStandardizedConv2d):
    """Convolution with gain * (w - mean) / sqrt(fan_in * (var + eps)) per filter.

    Brock et al. 2021, arXiv:2101.08692: white inputs keep their variance without a norm. `gain`
    (O) is learned and starts at one; the nonlinearity's gain is in act=scaled_relu. timm's
    ScaledStdConv2d is the same; the authors' code bounds fan_in * var from below by 1e-4 instead of
    adding an eps.
    """

    norm_parameters = ("gain",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def filters(self) -> Tensor:
        fan_in = self.weight[0].numel()
        scale = self.gain * fan_in**-0.5  # (O)
        return scale.view(-1, 1, 1, 1) * super().filters()


class ResidualScale(nn.Module):
    """y = scale * x with a learned scale of any shape, at the end of a residual branch.

    A single scale that starts at zero makes the network begin as its skip connections: SkipInit (De
    and Smith 2020, arXiv:2002.10444). A scale per channel is LayerScale (Touvron et al. 2021,
    arXiv:2103.17239); timm's CaiT starts it at 1e-5 in 24 layers, at 1e-6 in its largest networks.
    """

    norm_parameters = ("scale",)

    def __init__(self, start: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, float(start)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.dtype)


# Activations on maps (N, C, *), built from the number of channels C.
ACTIVATIONS: dict[Act, Callable[[int], nn.Module]] = {
    "relu": lambda _: nn.ReLU(),
    "gelu": lambda _: nn.GELU(),
    "silu": lambda _: nn.SiLU(),
    "tlu": TLU,
    "scaled_relu": lambda _: ScaledReLU(),
    "proxy_relu": lambda num_features: ProxyActivation(num_features, F.relu),
    "proxy_silu": lambda num_features: ProxyActivation(num_features, F.silu),
    "identity": lambda _: nn.Identity(),
}


CONVOLUTIONS: dict[Conv, type[nn.Conv2d]] = {
    "plain": nn.Conv2d,
    "weight_standardized": WeightStandardizedConv2d,
    "scaled_weight_standardized": ScaledWeightStandardizedConv2d,
}
