"""The modules of the slots, as models ask for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.norms.activations import ACTIVATIONS
from normexp.norms.convolutions import CONVOLUTIONS
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
