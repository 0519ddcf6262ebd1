"""What a model receives: builds the norm of each site and what its slots put around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from normexp.norms.activations import ACTIVATIONS
from normexp.norms.adapt import note_lone_tokens
from normexp.norms.convolutions import CONVOLUTIONS
from normexp.norms.site import Site
from normexp.norms.slots import Placement, Slots


class ResidualScale(nn.Module):
    """y = scale * x with one learned number, at the end of a residual branch.

    Started at zero, the network begins as its skip connections: SkipInit (De and Smith 2020,
    arXiv:2002.10444) and, for the same reason, a zero-initialised last weight of each branch's norm
    (Goyal et al. 2017, arXiv:1706.02677). It counts as a norm's parameter for weight decay.
    """

    norm_parameters = ("scale",)

    def __init__(self, start: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(start)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.dtype)


class PartFactory:
    """What `slots` put around a norm; `used` holds the slots that models have asked for."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.used: set[str] = set()

    def act(self, num_features: int) -> nn.Module:
        """The activation behind a norm of `num_features`, on maps (N, C, *)."""
        self.used.add("act")
        return ACTIVATIONS[self.slots.act](num_features)

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
        """A convolution over (N, C, H, W), with the arguments and the defaults of nn.Conv2d."""
        self.used.add("conv")
        build = CONVOLUTIONS[self.slots.conv]
        return build(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias
        )

    def residual(self) -> nn.Module:
        """What a residual branch ends with; any shape in and out."""
        self.used.add("residual_scale")
        start = self.slots.residual_scale
        return nn.Identity() if start is None else ResidualScale(start)

    @property
    def placement(self) -> Placement:
        """Where norms sit in a transformer block."""
        self.used.add("placement")
        return self.slots.placement

    @property
    def qk_norm(self) -> bool:
        """Whether attention has norms on its queries and keys."""
        self.used.add("qk_norm")
        return self.slots.qk_norm


class NormFactory(PartFactory):
    """Builds the norm of each site: `norm(C)` for maps (N, C, *), `norm.tokens(C)` for (B, T, C).

    What goes with a norm, its slots, comes from here too: `norm.act(C)`, `norm.conv(...)`,
    `norm.residual()`, `norm.placement` and `norm.qk_norm`, as `PartFactory` has them.

    Args:
        make: builds the bare norm for a number of features.
        view: how a token site shows (B, T, C) to the norm: `token` as (B*T, C), each position a
            sample of its own; `sequence` as (B, C, T), where a norm may pool positions.
        norm_batch_size: samples that share batch statistics in training; None for all of a forward.
        slots: what surrounds a norm.
    """

    def __init__(
        self,
        make: Callable[[int], nn.Module],
        *,
        view: Literal["token", "sequence"] = "token",
        norm_batch_size: int | None = None,
        slots: Slots | None = None,
    ) -> None:
        super().__init__(slots or Slots())
        self.make = make
        self.view: Literal["token", "sequence"] = view
        self.norm_batch_size = norm_batch_size
        self._is_noted = False

    def __call__(self, num_features: int) -> Site:
        return Site(self.make(num_features), "map", self.norm_batch_size)

    def tokens(self, num_features: int) -> Site:
        norm = self.make(num_features)
        if self.view == "token" and not self._is_noted:
            note_lone_tokens(norm)
            self._is_noted = True
        return Site(norm, self.view, self.norm_batch_size)
