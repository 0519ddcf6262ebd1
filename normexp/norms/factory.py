"""The norm factory that every model takes: it builds each norm and the parts around it.

    self.norm1 = norm(width)                 a site for maps (N, C, *)
    self.norm2 = norm.tokens(width)          a site for tokens (B, T, C)
    self.act = norm.act(width)               the rest are slots; see norms/slots.py
    self.conv = norm.conv(3, width, kernel_size=3)

A model never asks which norm it got. The parts follow: activations, convolutions, residual scales.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.base import Affine
from normexp.norms.site import AsBuiltSite, Site, View, named_sites
from normexp.norms.slots import Act, Conv, Placement, Slots


class NormFactory:
    """Builds the norm of each site, and what the slots put around it.

    Args:
        make: builds the bare norm from the number of features, and `settings` if a model has any.
        view: how a token site shows (B, T, C) to the norm: `token` as (B*T, C), each position a
            sample of its own; `sequence` as (B, C, T), where a norm may pool positions.
        norm_batch_size: samples that share batch statistics in training; None for all of a forward.
        slots: what surrounds a norm.
        keeps_norms: a network with norms of its own keeps them, see `around`; `make` refuses.
        at: the norms of single sites, by a glob of their names; see `put_norms`.

    Attributes:
        used: the slots that models have asked for; setting any other is refused.
    """

    def __init__(
        self,
        make: Callable[..., nn.Module],
        *,
        view: Literal["token", "sequence"] = "token",
        norm_batch_size: int | None = None,
        slots: Slots | None = None,
        keeps_norms: bool = False,
        at: Mapping[str, NormFactory] | None = None,
    ) -> None:
        self.make = make
        self.keeps_norms = keeps_norms
        self.view: Literal["token", "sequence"] = view
        self.norm_batch_size = norm_batch_size
        self.slots = slots or Slots()
        self.at = at or {}
        self.used: set[str] = set()

    def __call__(self, num_features: int, **settings: Any) -> Site:
        """Returns a site for maps (N, C, *). For `settings`, see `bare`."""
        return self._site("map", num_features, settings)

    def tokens(self, num_features: int, **settings: Any) -> Site:
        """Returns a site for tokens (B, T, C) or (N, *, C). For `settings`, see `bare`."""
        return self._site(self.view, num_features, settings)

    def _site(self, view: View, num_features: int, settings: Mapping[str, Any]) -> Site:
        site = Site(self.bare(num_features, **settings), view, self.norm_batch_size)
        site.num_features = num_features
        return site

    def around(self, norm: nn.Module, *, is_last: bool) -> AsBuiltSite:
        """Returns a site around a norm that a network already has, which runs as it is.

        Args:
            is_last: the norm takes its channels as the last axis, as nn.LayerNorm does.
        """
        return AsBuiltSite(norm, "token" if is_last else "map", self.norm_batch_size)

    def put_norms(self, network: nn.Module) -> None:
        """Gives the sites that a glob of `at` matches the norm that stands there.

        Raises:
            UserError: a glob that matches no site.
        """
        sites = dict(named_sites(network))
        for glob, factory in self.at.items():
            names = fnmatch.filter(sites, glob)
            if not names:
                raise UserError(
                    f"norm.at={{{glob}:...}}: no such site; the sites are {', '.join(sites)}"
                )
            for name in names:
                build = factory if sites[name].view == "map" else factory.tokens
                network.set_submodule(name, build(sites[name].num_features))

    def unsplit(self) -> NormFactory:
        """Returns a factory of the same norms that does not divide a forward into sub-batches."""
        at = {glob: factory.unsplit() for glob, factory in self.at.items()}
        return NormFactory(
            self.make, view=self.view, slots=self.slots, keeps_norms=self.keeps_norms, at=at
        )

    def bare(self, num_features: int, **settings: Any) -> nn.Module:
        """Returns a norm without a site.

        Restores the random state, so that a model starts from the same weights with every norm.

        Args:
            settings: eps, momentum and affine of the norm that this one replaces; `make` applies
                those that the new norm has and the config does not set.
        """
        with torch.random.fork_rng(devices=[]):
            return self.make(num_features, **settings)

    def act(self, num_features: int) -> nn.Module:
        """Returns the activation after a norm of `num_features`, on maps (N, C, *)."""
        return ACTIVATIONS[self._use("act")](num_features)

    def conv(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
    ) -> nn.Conv2d:
        """Returns a convolution over (N, C, H, W); arguments and defaults as nn.Conv2d."""
        build = CONVOLUTIONS[self._use("conv")]
        return build(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias
        )

    def residual(self, *shape: int) -> nn.Module:
        """Returns the last module of a residual branch; any shape in and out.

        Args:
            shape: of `layer_scale`, one number per channel: (C,) for tokens, (C, 1, 1) for maps.
                Without a shape the branch ignores `layer_scale`.
        """
        starts: list[tuple[Any, tuple[int, ...]]] = [(self._use("residual_scale"), ())]
        if shape:
            starts.append((self._use("layer_scale"), shape))
        scales = [ResidualScale(start, size) for start, size in starts if start is not None]
        if len(scales) == 1:
            return scales[0]
        return nn.Sequential(*scales) if scales else nn.Identity()

    @property
    def placement(self) -> Placement:
        """Where norms sit in a transformer block."""
        return self._use("placement")

    @property
    def qk_norm(self) -> bool:
        """True if attention normalizes its queries and keys."""
        return self._use("qk_norm")

    @property
    def v_norm(self) -> bool:
        """True if attention normalizes its values."""
        return self._use("v_norm")

    def _use(self, slot: str) -> Any:
        self.used.add(slot)
        return getattr(self.slots, slot)


class AsBuilt(nn.Module):
    """Stands in a config for the norms that a network has; sites are put around them.

    Never built: `models/surgery.py` leaves each norm of the network in its place.
    """


def is_shipped(target: str) -> bool:
    """True for the import path of a norm of this package, which is built without adapting it."""
    return target.startswith("normexp.norms.")


# Added to the variance of weights. The config's eps fits activations, which are far larger: at 1e-5
# it would shrink the filters of a wide layer, whose variance is 2 / fan_in, by a percent.
WEIGHT_EPS = 1e-6


class TLU(nn.Module):
    """max(x, tau), tau learned for each channel and initially zero, which is ReLU.

    The threshold of filter response norm (Singh and Krishnan 2020, arXiv:1911.09737), whose outputs
    are not centred. Shape (N, C, *) in and out.
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

    Proxy normalization of an activation f (Labatie et al. 2021, arXiv:2106.03743): it standardizes
    what f would return if its normalized input were normal in each channel. The layer or group norm
    before it has affine=false, because weight and bias are here. As in public code, g takes 256
    values with equal probabilities between them, and var is biased. Shape (N, C, *) in and out.
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
        y = self.function(affine.apply(x.to(torch.promote_types(x.dtype, scale.dtype))))
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
        return F.conv2d(x, self.filters(), self.bias, self.stride, self.padding)


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

    One number from zero makes the network begin as its skip connections: SkipInit (De and Smith
    2020, arXiv:2002.10444). A number per channel is LayerScale (Touvron et al. 2021,
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
