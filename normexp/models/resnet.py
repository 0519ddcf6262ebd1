"""ResNet in its CIFAR form (He et al. 2016, arXiv:1512.03385, section 4.2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models.common import check_image_shape, check_positive, init_conv_net
from normexp.norms.factory import NormFactory


class ResidualBlock(nn.Module):
    """relu(x' + residual(norm2(conv2(act(norm1(conv1(x))))))).

    x' is the paper's option A, without parameters or norm: x at every `stride`-th position, new
    channels zero. The outer ReLU is not `norm.act`, since it does not follow a norm directly.
    """

    def __init__(self, in_features: int, num_features: int, stride: int, norm: NormFactory) -> None:
        super().__init__()
        self.conv1 = norm.conv(in_features, num_features, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(num_features)
        self.act1 = norm.act(num_features)
        self.conv2 = norm.conv(num_features, num_features, 3, padding=1, bias=False)
        self.norm2 = norm(num_features)
        self.residual = norm.residual(num_features, 1, 1)
        self.stride = stride
        self.num_new = num_features - in_features

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and self.num_new == 0:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.conv1(x)))
        y = self.residual(self.norm2(self.conv2(y)))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three stages of (depth - 2) / 6 blocks, the mean over positions, a linear head.

    Shapes: (N, C, H, W) -> (N, num_outputs); the second and third stage halve the map. Depth 20 and
    width 16 make 0.27 million parameters, with two per channel in each norm.

    Args:
        depth: layers with weights, 6n + 2: 8, 14, 20, 32, 44, 56, 110.
        width: channels of the first stage; the others have twice and four times as many.

    Raises:
        UserError: a depth that is not 6n + 2; a width below 1; images below 5x5, whose last map
            would be a single position.
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
        check_image_shape(input_shape, smallest=5, model="resnet")
        if depth < 8 or (depth - 2) % 6:
            raise UserError(f"model.depth={depth} is not 6n + 2; try 8, 14, 20, 32, 44 or 56")
        self.stem = norm.conv(input_shape[0], width, 3, padding=1, bias=False)
        self.stem_norm = norm(width)
        self.stem_act = norm.act(width)
        num_blocks = (depth - 2) // 6
        self.stage1 = build_stage(width, width, 1, num_blocks, norm)
        self.stage2 = build_stage(width, 2 * width, 2, num_blocks, norm)
        self.stage3 = build_stage(2 * width, 4 * width, 2, num_blocks, norm)
        self.head = nn.Linear(4 * width, num_outputs)
        init_conv_net(self)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.stem_act(self.stem_norm(self.stem(inputs)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.head(x.mean(dim=(2, 3)))


def build_stage(
    in_features: int, num_features: int, stride: int, num_blocks: int, norm: NormFactory
) -> nn.Sequential:
    """Blocks with `num_features` channels; the first block changes width and resolution."""
    first = ResidualBlock(in_features, num_features, stride, norm)
    rest = [ResidualBlock(num_features, num_features, 1, norm) for _ in range(num_blocks - 1)]
    return nn.Sequential(first, *rest)
