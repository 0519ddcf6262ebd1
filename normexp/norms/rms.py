"""Norms by a root mean square: scaled, never centred.

RMS norm and its relatives pool the channels of each position; filter response norm and the global
response norm of ConvNeXt V2 pool the positions of each channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.affine import Affine, AffineNorm, over_channels
from normexp.norms.group import refuse_one_position
from normexp.norms.moments import measure_mean

LEARNED_EPS_INIT = 1e-4  # the paper's


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


class PreAffineRMSNorm(RMSNorm):
    """RMS norm of p * x, with a second learned weight p (C,) before the statistics.

    p is `pre_weight` and starts at 1; a large p lets one channel set the scale of all others.
    arXiv:2601.22966.
    """

    def add_state(self) -> None:
        self.pre_weight = nn.Parameter(torch.ones(self.num_features))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        return super().normalize(x * over_channels(self.pre_weight, x), real, affine)


@dataclass(eq=False, repr=False, kw_only=True)
class GatedRMSNorm(RMSNorm):
    """y * sigmoid(U silu(D y)) with y the RMS norm of x: a low-rank gate of each channel.

    D (rank, C) is `down.weight`, U (C, rank) `up.weight`. arXiv:2601.22966, which does not say
    where they start; as in kubotadaichi/gated-norm-experiment it is torch's default for linear
    layers, so that all gates begin near 1/2. Under autocast both are applied in half precision.

    Args:
        rank: numbers between D and U; 16 in the paper.
    """

    rank: int

    def add_state(self) -> None:
        self.require_positive("rank", 16)
        self.down = nn.Linear(self.num_features, self.rank, bias=False)
        self.up = nn.Linear(self.rank, self.num_features, bias=False)

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        y = super().normalize(x, real, affine).movedim(1, -1)  # (N, *, C)
        inner = F.silu(F.linear(y, self.down.weight.to(y.dtype)))
        return (y * F.linear(inner, self.up.weight.to(y.dtype)).sigmoid()).movedim(-1, 1)


class SeeDNorm(AffineNorm):
    """x / sqrt(mean_C(x^2) + eps) * (weight + alpha * tanh(sum_C(beta * x))).

    RMS norm with a gain that depends on x. Pools C at each position. alpha (C,) starts at 1 and
    beta (C,) at 0, where it is RMS norm. arXiv:2510.22777, without its form with several heads, as
    in swiss-ai/Megatron-LM (torch_norm.py).
    """

    has_bias = False

    def add_state(self) -> None:
        self.alpha = nn.Parameter(torch.ones(self.num_features))
        self.beta = nn.Parameter(torch.zeros(self.num_features))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        alpha, beta = (over_channels(v, x) for v in (self.alpha, self.beta))
        gain = alpha * torch.tanh((beta * x).sum(dim=1, keepdim=True))  # (N, C, *)
        gain = gain + (1 if affine.weight is None else over_channels(affine.weight, x))
        return x * inverse_rms(x, self.eps) * gain


@dataclass(eq=False, repr=False, kw_only=True)
class BHyT(AffineNorm):
    """tanh(alpha / kappa * x / sqrt(mean_C(x^2) + eps)) * weight, with one learned alpha.

    DyT of RMS-normalized values, which |alpha| / kappa sqrt(C) bounds, so that the tanh does not
    saturate in depth. Pools C at each position. arXiv:2601.09719; this is BHyT* of the authors'
    code (MLAI-Yonsei/BHyT). Plain BHyT estimates the mean square at the second norm of a block
    from that of the first, which a norm by itself cannot.

    Args:
        alpha_init: initial alpha; the code's default is 2, its scripts try 1 to 5.
        kappa: the divisor; it also makes the steps of alpha kappa times as short.
    """

    has_bias = False

    alpha_init: float = 2.0
    kappa: float = 10.0

    def add_state(self) -> None:
        self.require_positive("kappa", 10)
        self.alpha = nn.Parameter(torch.tensor(float(self.alpha_init)))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        scale = self.alpha.to(x.dtype) / self.kappa * inverse_rms(x, self.eps)
        return affine.apply(torch.tanh(x * scale))


@dataclass(eq=False, repr=False, kw_only=True)
class ScaleNorm(AffineNorm):
    """g * x / sqrt(sum_C(x^2) + C * eps), with one learned g. Pools C at each position.

    g is the parameter `weight` () and starts at sqrt(C), where the norm is RMS norm.
    arXiv:1910.05895. The paper has g * x / |x|; implementations bound |x| from below by eps. Some
    learn g / sqrt(C), from 1, which a step of the learning rate moves sqrt(C) times as far.
    """

    affine: bool = field(default=False, init=False)

    def add_state(self) -> None:
        self.weight = nn.Parameter(torch.tensor(self.num_features**0.5))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        assert affine.weight is not None
        weight = affine.weight / self.num_features**0.5
        return x * (weight * inverse_rms(x, self.eps))


class CRMSNorm(AffineNorm):
    """x / sqrt((sum_C(x^2) + sum_C(x)^2) / (C + 1) + eps) * weight: compressed RMS norm.

    Pools C at each position. arXiv:2305.14858. The channels are a vector of mean zero without its
    last coordinate, minus the sum of the others; this is the RMS norm, and the layer norm, of the
    whole vector. The authors' code has no weight. The paper also changes the layers around the
    norm, so that C coordinates carry what C + 1 did, which a norm alone cannot.
    """

    has_bias = False

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        squares = x.square().sum(dim=1, keepdim=True)  # (N, 1, *)
        dropped = x.sum(dim=1, keepdim=True)  # minus the dropped coordinate
        mean_square = (squares + dropped.square()) / (self.num_features + 1)
        return affine.apply(x * torch.rsqrt(mean_square + self.eps))


@dataclass(eq=False, repr=False, kw_only=True)
class FilterResponseNorm(AffineNorm):
    """x / sqrt(mean(x^2) + eps) * weight + bias, the mean over the positions of one channel.

    Nothing is centred. The paper's activation, max(y, tau), is a slot (act=tlu). arXiv:1911.09737.

    With one position the output is close to the sign of x, and refused. The paper's remedy for maps
    of 1x1 is a learned eps + |learned_eps|, one number per layer. Implementations differ: eps is
    1e-6 in the paper and 1e-5 in timm, which has no learned part; some learn a number per channel.

    Args:
        learn_eps: adds |learned_eps| to eps, a parameter () that starts at 1e-4.
    """

    learn_eps: bool = False

    def add_state(self) -> None:
        self.learned_eps = nn.Parameter(torch.tensor(LEARNED_EPS_INIT)) if self.learn_eps else None

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        if self.learned_eps is None:
            refuse_one_position(x.shape, "filter response norm", "norm.learn_eps=true")
            eps = self.eps
        else:
            eps = self.eps + self.learned_eps.to(x.dtype).abs()
        square, _ = measure_mean(x.square(), real, tuple(range(2, x.ndim)))
        return affine.apply(x, torch.rsqrt(square + eps))


@dataclass(eq=False, repr=False, kw_only=True)
class GlobalResponseNorm(AffineNorm):
    """x * (1 + response * g / (mean_C(g) + eps)) + shift, g the L2 norm of a channel's positions.

    `response` (C,) and `shift` (C,) start at 0, where it returns x: channels compete, and the scale
    of x is kept. GRN, arXiv:2301.00808. ConvNeXt V2 has it besides layer norm, after the
    activation; its code and timm's have eps 1e-6, and call the two weight and bias, or gamma and
    beta. With one position g is |x|.
    """

    affine: bool = field(default=False, init=False)

    def add_state(self) -> None:
        self.response = nn.Parameter(torch.zeros(self.num_features))
        self.shift = nn.Parameter(torch.zeros(self.num_features))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real, affine
        positions = tuple(range(2, x.ndim))
        g = torch.linalg.vector_norm(x, dim=positions, keepdim=True) if positions else x.abs()
        g = g / (g.mean(dim=1, keepdim=True) + self.eps)
        response, shift = (over_channels(v, x) for v in (self.response, self.shift))
        return torch.addcmul(shift, x, 1 + response * g)


def inverse_rms(x: Tensor, eps: float, *, axis: int = 1) -> Tensor:
    """Returns 1 / sqrt(mean_C(x^2) + eps) of x, the channels along `axis`, kept with size 1."""
    return torch.rsqrt(x.square().mean(dim=axis, keepdim=True) + eps)
