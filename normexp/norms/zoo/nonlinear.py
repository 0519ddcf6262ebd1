"""Norms designed with an activation or as one: response norms, EvoNorm, bounded functions."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from normexp.norms.base import (
    Affine,
    AffineNorm,
    Moments,
    knobs,
    measure,
    measure_mean,
    over_channels,
)
from normexp.norms.contract import Mask
from normexp.norms.running import SampleMomentsNorm
from normexp.norms.sample import ChannelGroupsNorm, refuse_one_position

LEARNED_EPS_INIT = 1e-4  # the paper's


@knobs
class FilterResponseNorm(AffineNorm):
    """x / sqrt(mean(x^2) + eps) * weight + bias, the mean over the positions of one channel.

    Nothing is centred. The paper's activation, max(y, tau), is a slot (act=tlu). arXiv:1911.09737.

    An input of one position is refused, because the output would be close to the sign of x. The
    paper's remedy for maps of 1x1 is a learned eps + |learned_eps|, one number per layer. eps is
    1e-6 in the paper and 1e-5 in timm, which learns none; some code learns a number per channel.

    Args:
        learn_eps: adds |learned_eps| to eps, a parameter () that starts at 1e-4.
    """

    learn_eps: bool = False

    def add_state(self) -> None:
        self.learned_eps = nn.Parameter(torch.tensor(LEARNED_EPS_INIT)) if self.learn_eps else None

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if self.learned_eps is None:
            refuse_one_position(x.shape, "filter response norm", "norm.learn_eps=true")
            eps = self.eps
        else:
            eps = self.eps + self.learned_eps.to(x.dtype).abs()
        square, _ = measure_mean(x.square(), real, tuple(range(2, x.ndim)))
        return affine.apply(x, torch.rsqrt(square + eps))


@knobs
class GlobalResponseNorm(AffineNorm):
    """x * (1 + response * g / (mean_C(g) + eps)) + shift, g the L2 norm of a channel's positions.

    `response` (C,) and `shift` (C,) start at 0, where the norm returns x. It makes channels compete
    and keeps the scale of x. GRN, arXiv:2301.00808. ConvNeXt V2 has it besides layer norm, after
    the activation; its code and timm's have eps 1e-6, and call the two weight and bias, or gamma
    and beta. With one position g is |x|.
    """

    learned = {"response": 0.0, "shift": 0.0}
    affine: bool = field(default=False, init=False)
    response: Tensor = field(init=False)
    shift: Tensor = field(init=False)

    def normalize(self, x: Tensor, _real: Mask, _affine: Affine) -> Tensor:
        positions = tuple(range(2, x.ndim))
        g = torch.linalg.vector_norm(x, dim=positions, keepdim=True) if positions else x.abs()
        g = g / (g.mean(dim=1, keepdim=True) + self.eps)
        response, shift = over_channels(self.response, x), over_channels(self.shift, x)
        return torch.addcmul(shift, x, 1 + response * g)


class EvoNormB0(SampleMomentsNorm):
    """x / max(sqrt(var_batch + eps), v * x + sqrt(var_own + eps)) * weight + bias.

    Both variances are biased and per channel: var_batch over all samples and positions, in
    evaluation the running average of its unbiased form; var_own over the positions of the sample,
    zero where there is one. It contains its nonlinearity: no activation should follow. `v` (C,)
    starts at 1. arXiv:2004.02967, found by a search.

    The running mean does not normalize; with it, parts of a step merge exactly. timm's EvoNorm2dB0
    computes the same, keeps no running mean, and has eps 1e-3; the paper has 1e-5.
    """

    learned = {"v": 1.0}
    v: Tensor

    def combine(
        self, x: Tensor, samples: Moments, _: Tensor, var: Tensor, affine: Affine
    ) -> Tensor:
        of_sample = over_channels(self.v, x, axis=2) * x + torch.sqrt(samples.var + self.eps)
        of_batch = torch.sqrt(var + self.eps)
        # Not torch.maximum, whose backward halves ties and takes several times as long.
        larger = torch.where(of_sample < of_batch, of_batch, of_sample)
        return affine.apply(x / larger, axis=2)


class EvoNormS0(ChannelGroupsNorm):
    """x * sigmoid(v * x) / sqrt(var + eps) * weight + bias, var over C/G channels and positions.

    x is not centred. The channels of a sample fall into G = `num_groups` runs. It contains its
    nonlinearity: no activation should follow. `v` (C,) starts at 1. timm's EvoNorm2dS0 computes the
    same, with 32 groups as in the paper, and so does its S0a, with eps 1e-3. Some code has the
    unbiased variance. arXiv:2004.02967.
    """

    learned = {"v": 1.0}
    v: Tensor

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        self.refuse_one_value(x)
        by_group = (self.num_groups, -1)
        groups = x.unflatten(1, by_group)  # (N, G, C/G, *)
        real = None if real is None else real.unsqueeze(1)  # (N, 1, 1, *)
        var = measure(groups, real, tuple(range(2, groups.ndim))).var
        gated = x * torch.sigmoid(over_channels(self.v, x) * x)
        out = gated.unflatten(1, by_group) * torch.rsqrt(var + self.eps)
        return affine.apply(out.flatten(1, 2))


@knobs
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

    def normalize(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        z = self.alpha.to(x.dtype) * x
        if self.shift is not None:
            z = z + self.shift.to(x.dtype)
        return affine.apply(self.squash(z))

    def squash(self, z: Tensor) -> Tensor:
        """Returns the bounded function of `z`, in its dtype."""
        raise NotImplementedError


class DyT(DynamicSquashing):
    """tanh(alpha * x) * weight + bias: dynamic tanh. arXiv:2503.10622.

    The paper replaces the layer norms of transformers; in place of batch norm it reports a loss of
    accuracy. Its language models start alpha larger in attention.
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

    `linear_clip` in the code of arXiv:2512.10938. arXiv:2604.23434 uses a hard tanh to ask whether
    the bound is what makes DyT a regularizer.
    """

    def squash(self, z: Tensor) -> Tensor:
        return z.clamp(-1, 1)
