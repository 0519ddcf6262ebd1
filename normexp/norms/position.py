"""Positional normalization: each position by itself, without parameters."""

from __future__ import annotations

from normexp.norms.layer import LayerNorm2d


class PositionNorm(LayerNorm2d):
    """(x - mean) / sqrt(var + eps), moments over C at each position; PONO. arXiv:1907.04312.

    Shape (N, C, *) in and out, statistics in float32 or wider. It is `LayerNorm2d` without an
    affine. The paper divides by C in the variance; the authors' code takes torch's unbiased
    variance, over C - 1: its output is smaller by sqrt((C - 1) / C). In the paper the moments are
    moreover handed to a later layer (moment shortcut), which is part of a model and not of a norm.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps=eps, affine=False)
