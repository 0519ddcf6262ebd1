"""A network that gives each pixel of an image its class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.training.models.common import check_image_shape, check_positive
from normexp.training.models.vision import init_conv_net


class DoubleConv(nn.Module):
    """Twice 3x3 convolution, norm, activation."""

    def __init__(self, in_features: int, num_features: int, norm: NormFactory) -> None:
        super().__init__()
        self.conv1 = norm.conv(in_features, num_features, 3, padding=1, bias=False)
        self.norm1 = norm(num_features)
        self.act1 = norm.act(num_features)
        self.conv2 = norm.conv(num_features, num_features, 3, padding=1, bias=False)
        self.norm2 = norm(num_features)
        self.act2 = norm.act(num_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.conv1(x)))
        return self.act2(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Maps shrink and widen on the way down; on the way up, each meets the one of its size.

    Ronneberger et al. 2015, arXiv:1505.04597, with padded convolutions, norms, and the nearest
    pixel repeated in place of up-convolutions.

    Shapes: (N, C, H, W) -> (N, num_outputs, H, W).

    Args:
        depth: how often the map is halved.
        width: channels at the size of the image; each halving doubles them.

    Raises:
        UserError: images whose sides 2**depth does not divide.
    """

    def __init__(
        self,
        norm: NormFactory,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        depth: int,
        width: int,
    ) -> None:
        super().__init__()
        check_positive(depth=depth, width=width)
        check_image_shape(input_shape, smallest=2**depth, model="unet")
        channels, *sides = input_shape
        if any(side % 2**depth for side in sides):
            fitting = max(d for d in range(depth) if all(side % 2**d == 0 for side in sides))
            remedy = f"try model.depth={fitting}" if fitting else "crop them to even sizes"
            raise UserError(
                f"model.depth={depth} halves images of {sides[0]}x{sides[1]} to fractions of a "
                f"pixel; {remedy}"
            )
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList()
        for before, after in zip([channels, *widths], widths, strict=False):
            self.down.append(DoubleConv(before, after, norm))
        self.up = nn.ModuleList()
        for after in reversed(widths[:-1]):
            self.up.append(DoubleConv(3 * after, after, norm))  # 2 from below, 1 from the side
        self.head = nn.Conv2d(width, num_outputs, 1)
        init_conv_net(self)
        nn.init.kaiming_normal_(self.head.weight, nonlinearity="linear")  # no ReLU follows
        assert self.head.bias is not None
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        x, maps = inputs, []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            maps.append(x)
        for block, beside in zip(self.up, reversed(maps[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), beside], dim=1))
        return self.head(x)
