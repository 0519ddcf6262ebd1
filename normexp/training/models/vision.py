"""Networks of small images: a convnet, a ResNet, a deep MLP and a Vision Transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.site import modules_outside_sites
from normexp.training.models.common import check_image_shape, check_positive
from normexp.training.models.transformer import Transformer


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
        if x.stride(1) == 1:  # channels lie last, and the gradient of a slice would not
            x = F.avg_pool2d(x, 1, self.stride)
        else:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.num_new))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.conv1(x)))
        y = self.residual(self.norm2(self.conv2(y)))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three stages of (depth - 2) / 6 blocks, the mean over positions, a linear head.

    The CIFAR form of He et al. 2016, arXiv:1512.03385, section 4.2.

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
    blocks = [ResidualBlock(in_features, num_features, stride, norm)]
    for _ in range(num_blocks - 1):
        blocks.append(ResidualBlock(num_features, num_features, 1, norm))
    return nn.Sequential(*blocks)


class DeepMLP(nn.Module):
    """Linear layer, norm and tanh, `depth` times; then a linear head.

    Shapes: (N, *) -> (N, num_outputs); norms see (N, width). Weights as Glorot and Bengio 2010,
    "Understanding the difficulty of training deep feedforward neural networks"; biases zero.

    Args:
        depth: hidden layers.
        width: features of a hidden layer.
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
        sizes = [math.prod(input_shape), *[width] * (depth - 1)]
        self.layers = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.norms = nn.ModuleList(norm(width) for _ in range(depth))
        self.head = nn.Linear(width, num_outputs)
        for module in modules_outside_sites(self):
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).tanh()
        return self.head(x)


@dataclass(eq=False, repr=False)
class ViT(Transformer):
    """Patches become tokens with learned positions; blocks, final norm, maximum over tokens.

    Dosovitskiy et al. 2021, arXiv:2010.11929, for small images.

    Shapes: (N, C, H, W) -> (N, num_outputs). The paper has a class token instead of the maximum; a
    mean would erase a norm that centres each channel over positions. Other sizes as in
    `Transformer`.

    Args:
        patch_size: pixels along a side of a patch; divides H and W.

    Raises:
        UserError: an image that the patches do not divide, or of fewer than 2x2 patches; other
            sizes that do not fit.
    """

    input_shape: tuple[int, ...]
    num_outputs: int
    patch_size: int = field(kw_only=True)

    def __post_init__(self, norm: NormFactory) -> None:
        check_positive(patch_size=self.patch_size)
        check_image_shape(self.input_shape, smallest=2 * self.patch_size, model="vit")
        _, height, width = self.input_shape
        common = math.gcd(height, width)
        if common % self.patch_size:
            fitting = max(size for size in range(1, self.patch_size) if common % size == 0)
            raise UserError(
                f"model.patch_size={self.patch_size} does not divide images of "
                f"{height}x{width}; try model.patch_size={fitting}"
            )
        super().__post_init__(norm)
        # Pixels have unit variance, and so should tokens.
        nn.init.kaiming_normal_(self.patch_embedding.weight, nonlinearity="linear")

    def add_embedding(self) -> None:
        channels, rows, columns = self.input_shape
        self.patch_embedding = nn.Linear(channels * self.patch_size**2, self.width)
        self.positions = nn.Embedding(rows * columns // self.patch_size**2, self.width)

    def build_head(self) -> nn.Linear:
        return nn.Linear(self.width, self.num_outputs)

    def split(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, T, C * patch_size^2), T patches row by row."""
        size = self.patch_size
        x = images.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (N, C, h, P, w, P)
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.patch_embedding(self.split(inputs)) + self.positions.weight
        return self.head(self.apply_blocks(x).amax(dim=1))


def init_conv_net(model: nn.Module) -> None:
    """Draws normal weights of variance 2 / fan_in, for ReLU (He et al. 2015, arXiv:1502.01852).

    The linear head, which no ReLU follows, gets variance 1 / fan_in and a zero bias.
    """
    for module in modules_outside_sites(model):
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.zeros_(module.bias)
