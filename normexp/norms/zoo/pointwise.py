"""Bounded functions of each value, without statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normexp.norms.affine import Affine, AffineNorm


@dataclass(eq=False, repr=False, kw_only=True)
class DynamicSquashing(AffineNorm):
    """Abstract: squash(alpha * x + shift) * weight + bias, alpha () and shift () learned.

    Args:
        alpha_init: initial alpha, in 1 / units of x; the shift starts at 0.
    """

    alpha_init: float
    eps: float = field(default=0.0, init=False)
    is_shifted = True

    def add_state(self) -> None:
        self.alpha = nn.Parameter(torch.tensor(float(self.alpha_init)))
        self.shift = nn.Parameter(torch.tensor(0.0)) if self.is_shifted else None

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        z = self.alpha.to(x.dtype) * x
        return affine.apply(self.squash(z if self.shift is None else z + self.shift.to(x.dtype)))

    def squash(self, z: Tensor) -> Tensor:
        """Returns the bounded function of `z`, in its dtype."""
        raise NotImplementedError


class DyT(DynamicSquashing):
    """tanh(alpha * x) * weight + bias: dynamic tanh. arXiv:2503.10622.

    The paper replaces the layer norms of transformers, and reports a loss of accuracy where it
    replaces batch norm; its language models start attention with a larger alpha.
    """

    is_shifted = False

    def squash(self, z: Tensor) -> Tensor:
        return torch.tanh(z)


class Derf(DynamicSquashing):
    """erf(alpha * x + shift) * weight + bias. arXiv:2512.10938.

    The shift starts at 0, so initially DyT and Derf differ in the function alone.
    """

    def squash(self, z: Tensor) -> Tensor:
        return torch.erf(z)


class ISRU(DynamicSquashing):
    """z / sqrt(z^2 + 1) * weight + bias, z = alpha * x + shift: inverse square root unit.

    One of the functions that arXiv:2512.10938 compares with Derf. arXiv:2503.21708 derives it from
    RMS norm, with another parameter and without a shift.
    """

    def squash(self, z: Tensor) -> Tensor:
        return z * torch.rsqrt(z.square() + 1)


class HardTanh(DynamicSquashing):
    """clip(z, -1, 1) * weight + bias, z = alpha * x + shift: a bound without curvature.

    `linear_clip` of the authors' code of arXiv:2512.10938. arXiv:2604.23434 uses a hard tanh to ask
    whether it is the bound that makes DyT a regularizer.
    """

    def squash(self, z: Tensor) -> Tensor:
        return z.clamp(-1, 1)
