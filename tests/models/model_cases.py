"""Small instances of every shipped model, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normexp.models import GPT, ConvNet, ResNet, TextEncoder, ViT
from normexp.norms.factory import NormFactory


class PositionNorm(nn.Module):
    """Mean and variance over C at each position of (N, C, *); masked positions return as zero."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        shape = (-1, *[1] * (x.ndim - 2))
        var, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
        y = (x - mean) / (var + 1e-5).sqrt()
        y = y * self.weight.view(shape) + self.bias.view(shape)
        return y if mask is None else y.masked_fill(~mask.unsqueeze(1), 0)


class SequenceNorm(PositionNorm):
    """Mean and variance over the real positions of each channel of (N, C, T)."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        real = torch.ones_like(x[:, :1]) if mask is None else mask.unsqueeze(1).to(x.dtype)
        count = real.sum(dim=2, keepdim=True)
        mean = (x * real).sum(dim=2, keepdim=True) / count
        var = ((x - mean).square() * real).sum(dim=2, keepdim=True) / count
        y = (x - mean) / (var + 1e-5).sqrt()
        return (y * self.weight.view(-1, 1) + self.bias.view(-1, 1)) * real


IMAGES = (1, 8, 8)
VOCAB_SIZE, BLOCK_SIZE, NUM_OUTPUTS = 11, 12, 5


def build_resnet(norm: NormFactory) -> nn.Module:
    return ResNet(norm, IMAGES, NUM_OUTPUTS, depth=8, width=8)


def build_convnet(norm: NormFactory) -> nn.Module:
    return ConvNet(norm, IMAGES, NUM_OUTPUTS, width=8)


def build_vit(norm: NormFactory, dropout: float = 0.0) -> nn.Module:
    return ViT(
        norm, IMAGES, NUM_OUTPUTS, patch_size=4, depth=2, width=16, num_heads=2, dropout=dropout
    )


def build_gpt(norm: NormFactory, dropout: float = 0.0) -> nn.Module:
    return GPT(norm, VOCAB_SIZE, BLOCK_SIZE, depth=2, width=16, num_heads=2, dropout=dropout)


def build_text_encoder(norm: NormFactory, dropout: float = 0.0) -> nn.Module:
    return TextEncoder(
        norm, VOCAB_SIZE, BLOCK_SIZE, NUM_OUTPUTS, depth=2, width=16, num_heads=2, dropout=dropout
    )


BUILDERS: dict[str, Callable[[NormFactory], nn.Module]] = {
    "resnet": build_resnet,
    "convnet": build_convnet,
    "vit": build_vit,
    "gpt": build_gpt,
    "text_encoder": build_text_encoder,
}


def draw_arguments(name: str, num_samples: int) -> tuple[Tensor, ...]:
    """Arguments for the forward of a model of BUILDERS; strings of length 3 and up, padded."""
    if name in ("resnet", "convnet", "vit"):
        return (torch.randn(num_samples, *IMAGES),)
    tokens = torch.randint(VOCAB_SIZE, (num_samples, BLOCK_SIZE))
    if name == "gpt":
        return (tokens,)
    lengths = torch.randint(3, BLOCK_SIZE + 1, (num_samples, 1))
    return tokens, torch.arange(BLOCK_SIZE) < lengths
