"""Norms as users bring them: classes that share nothing with the project's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LlamaRMSNorm(nn.Module):
    """As in transformers, whose classes share nothing but this form and the end of the name."""

    def __init__(self, hidden_size: int, variance_epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = variance_epsilon

    def gain(self) -> Tensor:
        return self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        scale = hidden.square().mean(dim=-1, keepdim=True) + self.variance_epsilon
        return self.gain() * hidden / scale.sqrt()


class StrangerNorm(nn.Module):
    """Divides by a running mean of |x| over the batch, which it keeps and counts."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.register_buffer("size", torch.ones(num_features))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:  # (N, C, *)
        shape = (1, -1, *[1] * (x.ndim - 2))
        size = self.size
        if self.training:
            size = x.abs().mean(dim=(0, *range(2, x.ndim)))
            self.size = 0.8 * self.size + 0.2 * size.detach()  # reassigned, as many do
            self.count += 1
        return x / (size + 0.1).view(shape) * self.weight.view(shape)
