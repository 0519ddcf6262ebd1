"""A small fast convolutional network for images of 8x8 to 32x32 pixels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from normexp.models.common import check_image_shape, check_positive, init_conv_net
from normexp.norms.factory import NormFactory


def shrink(x: Tensor) -> Tensor:
    """Halves a map (N, C, H, W) larger than 4x4; smaller ones keep positions to pool over."""
    return F.max_pool2d(x, 2) if min(x.shape[-2:]) > 4 else x


class ConvNet(nn.Module):
    """Three times 3x3 convolution, norm, activation; then the mean over positions, a linear head.

    Shapes: (N, C, H, W) -> (N, num_outputs).

    Args:
        width: channels of the first stage; the second and third have twice as many.

    Raises:
        UserError: images below 4x4; a width below 1.
    """

    def __init__(
        self, norm: NormFactory, input_shape: tuple[int, ...], num_outputs: int, *, width: int
    ) -> None:
        super().__init__()
        check_positive(width=width)
        check_image_shape(input_shape, smallest=4, model="convnet")
        self.conv1 = norm.conv(input_shape[0], width, 3, padding=1, bias=False)
        self.norm1 = norm(width)
        self.act1 = norm.act(width)
        self.conv2 = norm.conv(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = norm(2 * width)
        self.act2 = norm.act(2 * width)
        self.conv3 = norm.conv(2 * width, 2 * width, 3, padding=1, bias=False)
        self.norm3 = norm(2 * width)
        self.act3 = norm.act(2 * width)
        self.head = nn.Linear(2 * width, num_outputs)
        init_conv_net(self)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.conv1(inputs)))
        x = self.act2(self.norm2(self.conv2(shrink(x))))
        x = self.act3(self.norm3(self.conv3(shrink(x))))
        return self.head(x.mean(dim=(2, 3)))
