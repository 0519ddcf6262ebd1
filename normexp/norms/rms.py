"""Root mean square normalization: scale without centring."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.contract import widen
from normexp.norms.none import in_dtype_of, zero_masked


class RMSNorm(nn.Module):
    """x / sqrt(mean_C(x^2) + eps) * weight. Pools C at each position. arXiv:1910.07467.

    Shape (N, C, *) in and out, statistics in float32 or wider. On (N, C) it is torch.nn.RMSNorm(C).
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = zero_masked(widen(x), mask).movedim(1, -1)  # (N, *, C)
        weight = in_dtype_of(wide, self.weight)
        out = F.rms_norm(wide, (self.num_features,), weight, self.eps).movedim(-1, 1)
        return zero_masked(out, mask).to(x.dtype)
