"""RMS norm that fades out during training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.affine import Affine, over_channels
from normexp.norms.moments import measure_mean
from normexp.norms.rms import inverse_rms
from normexp.norms.running import RunningNorm, group_dims
from normexp.norms.zoo.ramps import NUM_TRAINING_STEPS, before_step, linear_ramp, shares_to_steps


@dataclass(eq=False, repr=False, kw_only=True)
class TaperNorm(RunningNorm):
    """gate * x / r * weight + (1 - gate) * c * x * (anchor + drift), r = sqrt(mean_C(x^2) + eps).

    Pools C at each position. The gate is 1 up to the share `warmup` of the training, falls to 0 by
    half a cosine until the share `taper_end`, and stays there: what is left is a fixed scale of
    each channel. Its c is the ratio of two running averages of the warm-up, |weight * x|^2 / r and
    |weight * x|^2 over all samples and positions: c * weight * x is the least-squares fit of RMS
    norm. After the warm-up `anchor` (C,) keeps the weight, and `drift` (C,) is learned, from 0.
    arXiv:2602.10408.

    The paper learns one vector in place of anchor + drift, copied from the weight at the end of the
    warm-up; without weight decay of norms the training is the same. It also keeps the last norm of
    the network, or replaces it by a loss; here every site is tapered. Its implementations
    (Danieldotcomcoder/domain-shift-forgetting) agree on c and on averages with 0.99 of the past.

    Args:
        warmup, taper_end: shares of the training.
    """

    warmup: float
    taper_end: float
    num_training_steps: int = NUM_TRAINING_STEPS
    momentum: float = field()
    affine: bool = field(default=True, init=False)
    anchor: Tensor = field(init=False)
    running_scaled: Tensor = field(init=False)
    running_energy: Tensor = field(init=False)
    has_bias = False
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
        self.start = max(self.start, 1)  # without a step there is no c

    def add_state(self) -> None:
        super().add_state()
        self.drift = nn.Parameter(torch.zeros(self.num_features))
        self.register_buffer("anchor", torch.ones(self.num_features))
        for name in ("running_scaled", "running_energy"):
            self.register_buffer(name, torch.zeros(1))

    def check_shape(self, shape: torch.Size) -> None:
        """Accepts any input: no output needs two samples."""

    def new_weight(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        return self.momentum * (step <= self.start).to(dtype)

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        weight = affine.weight
        assert weight is not None
        step = before_step(self.num_batches_tracked, x.dtype) + 1
        with torch.no_grad():
            learns = step <= self.start + 1
            anchor = torch.where(learns, weight, before_step(self.anchor, x.dtype))
            scale = self._scale(x.dtype)
            weighted = (x * over_channels(weight, x, axis=2)).square()
            energy = weighted.sum(dim=2, keepdim=True)  # (G, N, 1, *)
            scaled = energy * inverse_rms(x, self.eps, axis=2)
            pooled, count = measure_mean(scaled, real, group_dims(x))
            whole, _ = measure_mean(energy, real, group_dims(x))
            self.anchor.copy_(anchor)
            self.move_averages(count, running_scaled=pooled, running_energy=whole)
        return self._taper(x, weight, step, anchor, scale)

    def normalize_by_running(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        step, anchor = self.num_batches_tracked.to(x.dtype), self.anchor.to(x.dtype)
        assert affine.weight is not None
        return self._taper(x, affine.weight, step, anchor, self._scale(x.dtype))

    def _scale(self, dtype: torch.dtype) -> Tensor:
        """Returns c (1,), as it is before a step moves its averages."""
        averages = (self.running_scaled, self.running_energy)
        scaled, energy = (before_step(average, dtype) for average in averages)
        return scaled / energy.clamp(min=torch.finfo(dtype).tiny)

    def _taper(self, x: Tensor, weight: Tensor, step: Tensor, anchor: Tensor, c: Tensor) -> Tensor:
        gate = (1 + torch.cos(math.pi * linear_ramp(step, self.start, self.end))) / 2
        fixed = (1 - gate) * c * (anchor + self.drift.to(x.dtype))
        scale = gate * over_channels(weight, x, axis=2) * inverse_rms(x, self.eps, axis=2)
        return x * (scale + over_channels(fixed, x, axis=2))
