"""Substitutes for a norm: a bounded function of each value, without statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.norms.affine import Affine, AffineNorm


class DynamicSquashing(AffineNorm):
    """Abstract: squash(x) * weight + bias, with one learned `alpha` () inside the function.

    Args:
        alpha_init: initial alpha, in 1 / units of x.
    """

    def __init__(self, num_features: int, *, alpha_init: float = 0.5, affine: bool = True) -> None:
        super().__init__(num_features, eps=0.0, affine=affine)
        self.alpha = nn.Parameter(torch.tensor(float(alpha_init)))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        return affine.apply(self.squash(x))

    def squash(self, x: Tensor) -> Tensor:
        """Returns the bounded function of `x`, in its dtype."""
        raise NotImplementedError


class DyT(DynamicSquashing):
    """tanh(alpha * x) * weight + bias: dynamic tanh. arXiv:2503.10622.

    The authors' code agrees; its channels are first or last by an argument. The paper replaces the
    layer norms of transformers, and reports a loss of accuracy where it replaces batch norm; its
    language models start attention with a larger alpha.
    """

    def squash(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha.to(x.dtype) * x)


class Derf(DynamicSquashing):
    """erf(alpha * x + shift) * weight + bias, with one learned alpha and shift. arXiv:2512.10938.

    The shift starts at 0 and alpha at 0.5, so that initially DyT and Derf differ in the function
    alone.
    """

    def add_state(self) -> None:
        self.shift = nn.Parameter(torch.tensor(0.0))

    def squash(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))
