"""Layer normalization, in the two meanings it has for maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.contract import widen
from normexp.norms.group import normalize_within_samples
from normexp.norms.none import in_dtype_of, zero_masked


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, moments over C and all positions of a sample.

    Shape (N, C, *) in and out, an affine per channel, statistics in float32 or wider. On (N, C) it
    is torch.nn.LayerNorm(C); with positions, torch.nn.GroupNorm with one group. arXiv:1607.06450.
    Public ones for maps differ in what they pool, (C, H, W) as here or C alone (`LayerNorm2d`), and
    torch.nn.LayerNorm([C, H, W]) has a weight and a bias per value, not per channel.
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
        if x.ndim == 2:
            return _normalize_channels(x, mask, self.weight, self.bias, eps=self.eps)
        return normalize_within_samples(x, mask, 1, self.weight, self.bias, eps=self.eps)


class LayerNorm2d(LayerNorm):
    """Layer norm with moments over C alone, at each position.

    Shape (N, C, *) in and out: torch.nn.LayerNorm(C) on the channels-last view, as ConvNeXt has it
    for maps (arXiv:2201.03545) and transformers for tokens. Positions never mix.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return _normalize_channels(x, mask, self.weight, self.bias, eps=self.eps)


def _normalize_channels(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    wide = zero_masked(widen(x), mask).movedim(1, -1)  # (N, *, C)
    weight, bias = in_dtype_of(wide, weight), in_dtype_of(wide, bias)
    out = F.layer_norm(wide, (wide.shape[-1],), weight, bias, eps).movedim(-1, 1)
    return zero_masked(out, mask).to(x.dtype)
