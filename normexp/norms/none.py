"""No norm."""

from __future__ import annotations

from torch import Tensor, nn

from normexp.norms.moments import zero_padding


class NoNorm(nn.Module):
    """y = x, without parameters. Shape (N, C, *) in and out; masked positions become zero."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return zero_padding(x, None if mask is None else mask.unsqueeze(1))
