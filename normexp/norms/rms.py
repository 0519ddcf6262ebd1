"""Norms by a root mean square: scaled, never centred.

RMS norm and its relatives pool the channels of each position; filter response norm pools the
positions of each channel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.affine import Affine, AffineNorm
from normexp.norms.group import refuse_one_position
from normexp.norms.moments import measure_mean

LEARNED_EPS_INIT = 1e-4  # the paper's


class RMSNorm(AffineNorm):
    """x / sqrt(mean_C(x^2) + eps) * weight. Pools C at each position. arXiv:1910.07467.

    On (N, C) it is torch.nn.RMSNorm(C), whose default eps is that of the dtype, 1.2e-7 in float32.
    Language models differ in whether they return to half precision before or after the weight, and
    some store the weight less one.
    """

    has_bias = False

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        if x.ndim == 2:  # torch's kernel wants channels last, which is slower for maps
            return F.rms_norm(x, (self.num_features,), affine.weight, self.eps)
        return affine.apply(x * inverse_rms(x, self.eps))


class SimpleRMSNorm(AffineNorm):
    """x / sqrt(mean_C(x^2) + eps): RMS norm without parameters. arXiv:2307.14995.

    The paper has x * sqrt(C) / |x| without eps; implementations bound |x| from below by a small
    number instead. timm's SimpleNorm is another norm: it has a weight, and divides by the unbiased
    standard deviation over C without centring x.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps=eps, affine=False)

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real, affine
        if x.ndim == 2:
            return F.rms_norm(x, (self.num_features,), None, self.eps)
        return x * inverse_rms(x, self.eps)


class ScaleNorm(AffineNorm):
    """g * x / sqrt(sum_C(x^2) + C * eps), with one learned g. Pools C at each position.

    g is the parameter `weight` () and starts at sqrt(C), where the norm is RMS norm.
    arXiv:1910.05895. The paper has g * x / |x|; implementations bound |x| from below by eps. Here
    eps adds to the mean square, as in every norm of this package. Some learn g / sqrt(C), from 1:
    the same function, but a step of the learning rate moves it sqrt(C) times as far.
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps=eps, affine=False)
        self.weight = nn.Parameter(torch.tensor(num_features**0.5))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        assert affine.weight is not None
        weight = affine.weight / self.num_features**0.5
        return x * (weight * inverse_rms(x, self.eps))


class CRMSNorm(AffineNorm):
    """x / sqrt((sum_C(x^2) + sum_C(x)^2) / (C + 1) + eps) * weight: compressed RMS norm.

    Pools C at each position. arXiv:2305.14858. The paper keeps a vector of C + 1 coordinates and
    mean zero without its last one, which is minus the sum of the others; this is the RMS norm, and
    the layer norm, of the whole vector. The paper also changes the layers around the norm, so that
    C coordinates carry what C + 1 did. A norm alone cannot: here the C channels of the model are
    the kept coordinates, as in the authors' code, which has no weight.
    """

    has_bias = False

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        squares = x.square().sum(dim=1, keepdim=True)  # (N, 1, *)
        dropped = x.sum(dim=1, keepdim=True)  # minus the dropped coordinate
        mean_square = (squares + dropped.square()) / (self.num_features + 1)
        return affine.apply(x * torch.rsqrt(mean_square + self.eps))


class FilterResponseNorm(AffineNorm):
    """x / sqrt(mean(x^2) + eps) * weight + bias, the mean over the positions of one channel.

    Nothing is centred. The paper's activation, max(y, tau), is a slot (act=tlu). arXiv:1911.09737.

    With one position the output is close to the sign of x. The paper's remedy for maps of 1x1 is a
    learned eps + |learned_eps|, one number per layer; without it one position is refused.
    Implementations differ: eps is 1e-6 in the paper and 1e-5 in timm, which has no learned part;
    some learn a number per channel, and some learn |eps| from 1e-6 with nothing added to it.

    Args:
        learn_eps: adds |learned_eps| to eps, a parameter () that starts at 1e-4.

    Raises:
        UserError: in forward, an input with one position, unless eps is learned.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        learn_eps: bool = False,
    ) -> None:
        super().__init__(num_features, eps=eps, affine=affine)
        self.learned_eps = nn.Parameter(torch.tensor(LEARNED_EPS_INIT)) if learn_eps else None

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        if self.learned_eps is None:
            refuse_one_position(x.shape, "filter response norm", "norm.learn_eps=true")
            eps = self.eps
        else:
            eps = self.eps + self.learned_eps.to(x.dtype).abs()
        square, _ = measure_mean(x.square(), real, tuple(range(2, x.ndim)))
        return affine.apply(x, torch.rsqrt(square + eps))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Returns 1 / sqrt(mean_C(x^2) + eps) of x (N, C, *): (N, 1, *)."""
    return torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)
