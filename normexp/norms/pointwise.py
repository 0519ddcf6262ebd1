"""In place of a norm: a bounded function of each value, without statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.norms.none import scale_and_shift, zero_masked
from normexp.norms.site import widen


class DyT(nn.Module):
    """tanh(alpha * x) * weight + bias, with one learned alpha: dynamic tanh. arXiv:2503.10622.

    Shape (N, C, *) in and out, computed in float32 or wider. Nothing is pooled: an output depends
    on one input value. The authors' code agrees; its channels are first or last by an argument.
    The paper makes it for transformers in place of layer norm, and reports a loss of accuracy in
    place of batch norm; language models there begin with a larger alpha in attention.

    Args:
        alpha_init: where alpha begins, in 1 / units of x; 0.5 in the paper.
    """

    def __init__(self, num_features: int, *, alpha_init: float = 0.5, affine: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.alpha = nn.Parameter(torch.tensor(float(alpha_init)))
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    def extra_repr(self) -> str:
        return f"{self.num_features}, affine={self.weight is not None}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = zero_masked(widen(x), mask)
        out = scale_and_shift(self.squash(wide), self.weight, self.bias)
        return zero_masked(out, mask).to(x.dtype)

    def squash(self, x: Tensor) -> Tensor:
        """The bounded function, in the dtype of `x`."""
        return torch.tanh(self.alpha.to(x.dtype) * x)


class Derf(DyT):
    """erf(alpha * x + shift) * weight + bias, with one learned alpha and shift. arXiv:2512.10938.

    Shape (N, C, *) in and out, computed in float32 or wider. Nothing is pooled. The shift begins at
    0, so that at first DyT and Derf differ in the function alone; alpha begins at 0.5, as there.
    """

    def __init__(self, num_features: int, *, alpha_init: float = 0.5, affine: bool = True) -> None:
        super().__init__(num_features, alpha_init=alpha_init, affine=affine)
        self.shift = nn.Parameter(torch.tensor(0.0))

    def squash(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))
