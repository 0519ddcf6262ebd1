"""Relatives of RMS norm, which pool the channels of each position."""

from __future__ import annotations

import math
from dataclasses import field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.base import Affine, AffineNorm, knobs, measure_mean, over_channels
from normexp.norms.contract import Mask
from normexp.norms.running import (
    NUM_TRAINING_STEPS,
    RunningNorm,
    before_step,
    group_dims,
    linear_ramp,
    shares_to_steps,
)
from normexp.norms.sample import RMSNorm, inverse_rms


class PreAffineRMSNorm(RMSNorm):
    """RMS norm of p * x, with a second learned weight p (C,) before the statistics.

    p is `pre_weight` and starts at 1; a large p lets one channel set the scale of all others.
    arXiv:2601.22966.
    """

    learned = {"pre_weight": 1.0}
    pre_weight: Tensor

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        return super().normalize(x * over_channels(self.pre_weight, x), real, affine)


@knobs
class GatedRMSNorm(RMSNorm):
    """y * sigmoid(U silu(D y)) with y the RMS norm of x: a low-rank gate of each channel.

    D (rank, C) is `down.weight`, U (C, rank) `up.weight`. arXiv:2601.22966 does not say how they
    start; as in kubotadaichi/gated-norm-experiment they start as torch's linear layers do, so that
    all gates begin near 1/2. Under autocast both are applied in half precision.

    Args:
        rank: 16 in the paper.
    """

    rank: int

    def check_knobs(self) -> None:
        self.require_positive("rank", 16)

    def add_state(self) -> None:
        self.down = nn.Linear(self.num_features, self.rank, bias=False)
        self.up = nn.Linear(self.rank, self.num_features, bias=False)

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        y = super().normalize(x, real, affine).movedim(1, -1)  # (N, *, C)
        hidden = F.silu(F.linear(y, self.down.weight.to(y.dtype)))
        gate = F.linear(hidden, self.up.weight.to(y.dtype)).sigmoid()
        return (y * gate).movedim(-1, 1)


@knobs
class SeeDNorm(AffineNorm):
    """x / sqrt(mean_C(x^2) + eps) * (weight + alpha * tanh(sum_C(beta * x))).

    RMS norm with a gain that depends on x. Pools C at each position. alpha (C,) starts at 1 and
    beta (C,) at 0, where it is RMS norm. arXiv:2510.22777 with a single head, as in
    swiss-ai/Megatron-LM (torch_norm.py).
    """

    has_bias: bool = False
    learned = {"alpha": 1.0, "beta": 0.0}
    alpha: Tensor = field(init=False)
    beta: Tensor = field(init=False)

    def normalize(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        alpha, beta = over_channels(self.alpha, x), over_channels(self.beta, x)
        gain = alpha * torch.tanh((beta * x).sum(dim=1, keepdim=True))  # (N, C, *)
        gain = gain + (1 if affine.weight is None else over_channels(affine.weight, x))
        return x * inverse_rms(x, self.eps) * gain


@knobs
class BHyT(AffineNorm):
    """tanh(alpha / kappa * x / sqrt(mean_C(x^2) + eps)) * weight, with one learned alpha.

    DyT of RMS-normalized values: |alpha| / kappa sqrt(C) bounds the argument of the tanh, so that
    it does not saturate in depth. Pools C at each position. arXiv:2601.09719; this is BHyT* of the
    authors' code (MLAI-Yonsei/BHyT). Plain BHyT estimates the mean square at the second norm of a
    block from that of the first, which a norm by itself cannot.

    Args:
        alpha_init: initial alpha; the code's default is 2, its scripts try 1 to 5.
        kappa: the divisor; it also makes the steps of alpha kappa times as small.
    """

    has_bias: bool = False

    alpha_init: float
    kappa: float

    def check_knobs(self) -> None:
        self.require_positive("kappa", 10)

    def add_state(self) -> None:
        self.alpha = nn.Parameter(torch.tensor(float(self.alpha_init)))

    def normalize(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        scale = self.alpha.to(x.dtype) / self.kappa * inverse_rms(x, self.eps)
        return affine.apply(torch.tanh(x * scale))


@knobs
class ScaleNorm(AffineNorm):
    """g * x / sqrt(sum_C(x^2) + C * eps), with one learned g. Pools C at each position.

    g is the parameter `weight` () and starts at sqrt(C), where the norm is RMS norm.
    arXiv:1910.05895. The paper has g * x / |x|; implementations bound |x| from below by eps. Some
    learn g / sqrt(C) from 1, and a step of the same learning rate moves g sqrt(C) times as far.
    """

    affine: bool = field(default=False, init=False)

    def add_state(self) -> None:
        self.weight = nn.Parameter(torch.tensor(self.num_features**0.5))

    def normalize(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        assert affine.weight is not None
        weight = affine.weight / self.num_features**0.5
        return x * (weight * inverse_rms(x, self.eps))


@knobs
class CRMSNorm(AffineNorm):
    """x / sqrt((sum_C(x^2) + sum_C(x)^2) / (C + 1) + eps) * weight: compressed RMS norm.

    Pools C at each position. arXiv:2305.14858. The channels are C coordinates of a vector of mean
    zero, whose last one is minus their sum; this is the RMS norm, and the layer norm, of the whole
    vector. The authors' code has no weight. The paper also changes the layers around the norm, so
    that C coordinates carry what C + 1 did, which a norm alone cannot.
    """

    has_bias: bool = False

    def normalize(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        squares = x.square().sum(dim=1, keepdim=True)  # (N, 1, *)
        last_coordinate = -x.sum(dim=1, keepdim=True)
        mean_square = (squares + last_coordinate.square()) / (self.num_features + 1)
        return affine.apply(x * torch.rsqrt(mean_square + self.eps))


@knobs
class TaperNorm(RunningNorm):
    """gate * x / r * weight + (1 - gate) * c * x * (anchor + drift), r = sqrt(mean_C(x^2) + eps).

    Pools C at each position. The gate is 1 up to the share `warmup` of the training, falls to 0 by
    half a cosine until the share `taper_end`, and stays there, which leaves a fixed scale for each
    channel. c is the ratio of the running averages of |weight * x|^2 / r and |weight * x|^2 over
    all samples and positions of the warm-up, so that c * weight * x is the least-squares fit of RMS
    norm. After the warm-up `anchor` (C,) keeps the weight, and `drift` (C,) is learned from 0.
    arXiv:2602.10408.

    The paper learns one vector in place of anchor + drift, copied from the weight at the end of the
    warm-up; without weight decay of norms the training is the same. It also keeps the last norm of
    the network, or replaces it by a loss; here every site is tapered. c and averages with 0.99 of
    the past are as in Danieldotcomcoder/domain-shift-forgetting.

    Args:
        warmup, taper_end: shares of the training.
    """

    warmup: float
    taper_end: float
    num_training_steps: int = NUM_TRAINING_STEPS
    momentum: float = field()
    affine: bool = field(default=True, init=False)
    drift: Tensor = field(init=False)
    anchor: Tensor = field(init=False)
    running_scaled: Tensor = field(init=False)
    running_energy: Tensor = field(init=False)
    learned = {"drift": 0.0}
    has_bias: bool = False
    needs_momentum = True

    def check_knobs(self) -> None:
        super().check_knobs()
        shares = {"warmup": self.warmup, "taper_end": self.taper_end}
        self.start, self.end = shares_to_steps(self.num_training_steps, **shares)
        if not 0 < self.warmup <= self.taper_end:
            raise UserError(
                f"warmup={self.warmup}, taper_end={self.taper_end}: warmup must be above 0, and "
                "taper_end not below warmup; try norm.warmup=0.1 norm.taper_end=0.6"
            )
        self.start = max(self.start, 1)  # c needs a step

    def add_state(self) -> None:
        super().add_state()
        self.register_buffer("anchor", self.vector(1))
        for name in ("running_scaled", "running_energy"):
            self.register_buffer(name, torch.zeros(1))

    def check_shape(self, shape: torch.Size) -> None:
        """Accepts any input: no output needs two samples."""

    def new_weight(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        return self.momentum * (step <= self.start).to(dtype)

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        weight = affine.weight
        assert weight is not None
        step = before_step(self.num_batches_tracked, x.dtype) + 1
        with torch.no_grad():
            is_warmup = step <= self.start + 1
            anchor = torch.where(is_warmup, weight, before_step(self.anchor, x.dtype))
            c = self._fit(x.dtype)
            squares = (x * over_channels(weight, x, axis=2)).square()
            energy = squares.sum(dim=2, keepdim=True)  # (G, N, 1, *)
            scaled = energy * inverse_rms(x, self.eps, axis=2)
            mean_scaled, count = measure_mean(scaled, real, group_dims(x))
            mean_energy, _ = measure_mean(energy, real, group_dims(x))
            self.anchor.copy_(anchor)
            self.move_averages(count, running_scaled=mean_scaled, running_energy=mean_energy)
        return self._taper(x, weight, step, anchor, c)

    def normalize_by_running(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        assert affine.weight is not None
        step, anchor = self.num_batches_tracked.to(x.dtype), self.anchor.to(x.dtype)
        return self._taper(x, affine.weight, step, anchor, self._fit(x.dtype))

    def _fit(self, dtype: torch.dtype) -> Tensor:
        """Returns c (1,) as it is before a step moves its averages."""
        scaled = before_step(self.running_scaled, dtype)
        energy = before_step(self.running_energy, dtype)
        return scaled / energy.clamp(min=torch.finfo(dtype).tiny)

    def _taper(self, x: Tensor, weight: Tensor, step: Tensor, anchor: Tensor, c: Tensor) -> Tensor:
        gate = (1 + torch.cos(math.pi * linear_ramp(step, self.start, self.end))) / 2
        fixed = (1 - gate) * c * (anchor + self.drift.to(x.dtype))
        scale = gate * over_channels(weight, x, axis=2) * inverse_rms(x, self.eps, axis=2)
        return x * (scale + over_channels(fixed, x, axis=2))
