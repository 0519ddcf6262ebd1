"""RMS norm: each position divided by the root mean square of its channels, never centred."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.norms.affine import Affine, AffineNorm


class RMSNorm(AffineNorm):
    """x / sqrt(mean_C(x^2) + eps) * weight. Pools C at each position. arXiv:1910.07467.

    On (N, C) it is torch.nn.RMSNorm(C), whose default eps is 1.2e-7 in float32. Language models
    differ in whether they return to half precision before or after the weight; some store the
    weight less one, which is `zero_centered`.
    """

    has_bias = False

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        if x.ndim == 2:  # torch's kernel wants channels last, which is slower for maps
            return F.rms_norm(x, (self.num_features,), affine.weight, self.eps)
        return affine.apply(x * inverse_rms(x, self.eps))


@dataclass(eq=False, repr=False, kw_only=True)
class SimpleRMSNorm(RMSNorm):
    """x / sqrt(mean_C(x^2) + eps): RMS norm without parameters. arXiv:2307.14995.

    The paper has x * sqrt(C) / |x| without eps; implementations bound |x| from below by a small
    number instead. timm's SimpleNorm is another norm: it has a weight, and divides by the unbiased
    standard deviation over C without centring x.
    """

    affine: bool = field(default=False, init=False)


def inverse_rms(x: Tensor, eps: float, *, axis: int = 1) -> Tensor:
    """Returns 1 / sqrt(mean_C(x^2) + eps) of x, the channels along `axis`, kept with size 1."""
    return torch.rsqrt(x.square().mean(dim=axis, keepdim=True) + eps)
