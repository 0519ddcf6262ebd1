"""Root mean square normalization, scale without centring, and its kin over channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.none import in_dtype_of, zero_masked
from normexp.norms.site import over_channels, widen


class RMSNorm(nn.Module):
    """x / sqrt(mean_C(x^2) + eps) * weight. Pools C at each position. arXiv:1910.07467.

    Shape (N, C, *) in and out, statistics in float32 or wider. On (N, C) it is torch.nn.RMSNorm(C),
    whose eps is that of the dtype unless given, 1.2e-7 in float32. Language models differ in where
    half precision begins, before or after the weight, and in a weight stored less one.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = zero_masked(widen(x), mask)
        weight = in_dtype_of(wide, self.weight)
        if x.ndim == 2:  # torch's kernel wants the channels last: for maps it is the slower way
            out = F.rms_norm(wide, (self.num_features,), weight, self.eps)
        else:
            out = wide * inverse_rms(wide, self.eps)
            out = out if weight is None else out * over_channels(weight, out)
        return zero_masked(out, mask).to(x.dtype)


class SimpleRMSNorm(RMSNorm):
    """x / sqrt(mean_C(x^2) + eps): RMS norm without parameters. arXiv:2307.14995.

    Shape (N, C, *) in and out, statistics in float32 or wider. The paper has x * sqrt(C) / |x|
    without eps. Implementations bound |x| from below by a small number in place of adding eps.
    timm's SimpleNorm is another norm: it has a weight, and divides by the unbiased standard
    deviation over C without centring x.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps=eps, affine=False)


class ScaleNorm(nn.Module):
    """g * x / sqrt(sum_C(x^2) + C * eps), with one learned g. Pools C at each position.

    Shape (N, C, *) in and out, statistics in float32 or wider. g is the parameter `weight` () and
    begins at sqrt(C), so that the norm begins as RMS norm. arXiv:1910.05895.

    The paper has g * x / |x|. Implementations bound |x| from below by eps; here eps adds to the
    mean square, as in every norm of this package. Some learn g / sqrt(C), from 1, in place of g:
    the same function, but a step of the learning rate moves it sqrt(C) times as far.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.tensor(num_features**0.5))

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = zero_masked(widen(x), mask)
        weight = self.weight.to(wide.dtype) / self.num_features**0.5
        out = wide * (weight * inverse_rms(wide, self.eps))
        return zero_masked(out, mask).to(x.dtype)


class CRMSNorm(nn.Module):
    """x / sqrt((sum_C(x^2) + sum_C(x)^2) / (C + 1) + eps) * weight: compressed RMS norm.

    Shape (N, C, *) in and out, statistics in float32 or wider. Pools C at each position.
    arXiv:2305.14858. The paper keeps a vector of d = C + 1 coordinates and mean zero without its
    last one, which is minus the sum of the others; the norm is the RMS norm, and the layer norm, of
    the whole vector.

    The paper also changes the layers around the norm, so that d - 1 coordinates carry what d did.
    A norm alone cannot: here the C channels of the model are the kept coordinates, as in the
    authors' code, and the layers stay as they are. Authors' code has no weight.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = zero_masked(widen(x), mask)
        squares = wide.square().sum(dim=1, keepdim=True)  # (N, 1, *)
        dropped = wide.sum(dim=1, keepdim=True)  # minus the coordinate that is not kept
        mean_square = (squares + dropped.square()) / (self.num_features + 1)
        out = wide * torch.rsqrt(mean_square + self.eps)
        weight = in_dtype_of(wide, self.weight)
        return (out if weight is None else out * over_channels(weight, out)).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean_C(x^2) + eps) of x (N, C, *): (N, 1, *)."""
    return torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)
