"""Instance normalization: each channel of each sample by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.group import normalize_within_samples


class InstanceNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, moments over the positions of one channel.

    Shape (N, C, *) in and out with more than one position, statistics in float32 or wider, in
    training and evaluation alike. arXiv:1607.08022. torch.nn's InstanceNorm has no affine unless
    told, where this one and many tutorials have one per channel; with track_running_stats it
    evaluates by averages over the training samples, which is not done here.

    Raises:
        UserError: the input has one position.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[2:].numel() == 1:
            raise UserError(
                f"instance norm needs positions to pool, and an input of shape {tuple(x.shape)} "
                "has one; try norm=layer or norm=group, or norm.view=sequence for tokens"
            )
        return normalize_within_samples(
            x, mask, self.num_features, self.weight, self.bias, eps=self.eps
        )
