"""A bounded function with learned slope and bound, in place of a norm."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from normexp.norms.base import Affine, AffineNorm, knobs, over_channels
from normexp.norms.contract import Mask


@knobs
class SALU(AffineNorm):
    """a * x / sqrt(1 + a * b * x^2): slope a at 0, bounded by +- sqrt(a / b). arXiv:2606.02927.

    a and b are positive and learned; there are no statistics, weight or bias. Only the abstract and
    the introduction of the paper were read. Here each channel has its own a and b, `log_a` and
    `log_b` (C,) start at 0, and the activation after it stays, which the paper replaces too.
    """

    learned = {"log_a": 0.0, "log_b": 0.0}
    log_a: Tensor = field(init=False)
    log_b: Tensor = field(init=False)
    affine: bool = field(default=False, init=False)
    eps: float = field(default=0.0, init=False)

    def normalize(self, x: Tensor, _: Mask, __: Affine) -> Tensor:
        a = over_channels(self.log_a, x).exp()
        b = over_channels(self.log_b, x).exp()
        return a * x * torch.rsqrt(1 + a * b * x.square())
