"""Batch norms that take other statistics.

L1BatchNorm   the mean absolute deviation in place of the standard deviation
EvalNorm      in evaluation, the moments of a sample weigh as much as in training
BatchRenorm   in training, the batch's moments are corrected towards the running averages
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.base import (
    NO_AFFINE,
    Affine,
    Moments,
    centre,
    knobs,
    measure_mean,
    pool_with_others,
)
from normexp.norms.contract import Mask
from normexp.norms.kernel import normalize_groups
from normexp.norms.running import (
    NUM_TRAINING_STEPS,
    RunningMomentsNorm,
    RunningNorm,
    before_step,
    group_dims,
    linear_ramp,
    measure_samples,
    shares_to_steps,
)

GAUSSIAN = math.sqrt(math.pi / 2)


class L1BatchNorm(RunningNorm):
    """(x - mean) / (s + eps) * weight + bias, s = sqrt(pi / 2) * mean(|x - mean|), as batch norm.

    Pools all samples and positions, without a square or a root. Evaluation uses the running
    averages of mean and s, without a correction for the number of values. L1BN of arXiv:1802.09769,
    which leaves the factor sqrt(pi / 2) to `weight`. arXiv:1803.01814 has the factor, which makes s
    the standard deviation of a normal distribution, and mentions no eps.

    If a step runs in parts or ghost groups, s is averaged over them, each about its own mean.
    """

    averages = {"running_mean": 0.0, "running_deviation": 1.0}

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        dims = group_dims(x)
        mean, count = measure_mean(x, real, dims)
        centred = centre(x, mean, real)
        absolute, _ = measure_mean(centred.abs(), real, dims)
        deviation = GAUSSIAN * absolute
        self.move_averages(count, running_mean=mean, running_deviation=deviation)
        return affine.apply(centred, 1 / (deviation + self.eps), axis=2)

    def normalize_by_running(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        mean, deviation = self.averages_like(x)
        return affine.apply(x - mean, 1 / (deviation + self.eps), axis=2)


class EvalNorm(RunningMomentsNorm):
    """Batch norm in training; in evaluation a sample's moments keep their weight in training.

    With m_i, v_i the moments of sample i over its positions, m, v the running averages and
    a = 1/B, evaluation normalizes by

        mean_i = a m_i + (1 - a) m,    var_i = a v_i + (1 - a) v + a (1 - a) (m_i - m)^2,

    the moments of a batch of sample i and B - 1 average others. For large B it is batch norm. B is
    measured, not set: a is the running average of 1 over the number of samples that shared
    statistics in training, and 1/2 before training.

    EvalNorm, arXiv:1904.06031, learns its weights per layer with an extra loss, to reproduce the
    outputs of training; without noise this would give a = 1/B. epfml/ghost-noise uses 1/B^2, and
    the biased variance in its running averages.
    """

    running_share: Tensor

    def add_state(self) -> None:
        super().add_state()
        self.register_buffer("running_share", torch.tensor(0.5))

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        self.running_share.fill_(0.5)

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        with torch.no_grad():
            share = 1 / x.shape[1]
            if real is not None:  # only samples with a real position count
                num_samples = real.flatten(2).any(dim=2).sum(dim=1)  # (G,)
                share = (1 / num_samples.clamp(min=1).to(x.dtype)).mean()
            weight = self.new_weight(self.num_batches_tracked + 1, self.running_share.dtype)
            self.running_share.mul_(1 - weight).add_(weight * share)
        return super().normalize_by_batch(x, real, affine)

    def normalize_by_running(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        share = self.running_share.to(x.dtype).clamp(max=1)
        mean, var = pool_with_others(measure_samples(x, real), share, *self.averages_like(x))
        return affine.apply(x - mean, torch.rsqrt(var + self.eps), axis=2)


@knobs
class BatchRenorm(RunningMomentsNorm):
    """((x - mean) / std * r + d) * weight + bias, moments over all samples and positions.

    With std = sqrt(var + eps), of the batch (B) and of the running averages before the step (R),

        r = clip(std_B / std_R, 1 / r_max, r_max),  d = clip((mean_B - mean_R) / std_R, +-d_max),

    and no gradient flows through r and d. Where neither is clipped, the training output equals the
    evaluation output with these averages. For the share `warmup` of the training, r = 1 and d = 0,
    which is batch norm; then the bounds grow linearly. Evaluation as batch norm. In the paper,
    arXiv:1702.03275, batch norm lasts 5000 steps, r_max grows to 3 at step 40000 and d_max to 5 at
    step 25000, with momentum 0.01; the shares in conf/norm have the same proportions.

    The paper averages the biased std, and ludvb/batchrenorm a std with eps added to it. Here the
    running variance averages the unbiased one, as in batch norm, so that parts of a step merge
    exactly.

    Args:
        r_max, d_max: final bounds.
        warmup: share of the training with batch norm alone.
        r_ramp_end, d_ramp_end: shares of the training after which the bounds are final.
    """

    r_max: float
    d_max: float
    warmup: float
    r_ramp_end: float
    d_ramp_end: float
    num_training_steps: int = NUM_TRAINING_STEPS

    def check_knobs(self) -> None:
        super().check_knobs()
        if self.r_max < 1 or self.d_max < 0:
            raise UserError(
                f"r_max={self.r_max}, d_max={self.d_max}: r_max must be 1 or more, d_max 0 or "
                "more; try norm.r_max=3 norm.d_max=5"
            )
        ends = {"r_ramp_end": self.r_ramp_end, "d_ramp_end": self.d_ramp_end}
        self.warmup_steps, self.r_steps, self.d_steps = shares_to_steps(
            self.num_training_steps, warmup=self.warmup, **ends
        )
        for knob, end in ends.items():
            if end < self.warmup:
                raise UserError(
                    f"{knob}={end} lies before warmup={self.warmup}; "
                    f"try norm.{knob}={self.warmup} or more"
                )

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        out, moments = normalize_groups(x, real, NO_AFFINE, self.eps)
        r, d = self._corrections(moments)
        self.advance(moments)
        return affine.apply(torch.addcmul(d, out, r), axis=2)

    @torch.no_grad()
    def _corrections(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Returns r and d of the coming step, shaped as the moments (G, 1, C, 1, ...)."""
        mean, var, _ = moments
        old_mean = before_step(self.running_mean, mean.dtype).view(mean.shape[1:])
        old_var = before_step(self.running_var, mean.dtype).view(mean.shape[1:])
        step = before_step(self.num_batches_tracked, mean.dtype) + 1
        r_bound = 1 + (self.r_max - 1) * linear_ramp(step, self.warmup_steps, self.r_steps)
        d_bound = self.d_max * linear_ramp(step, self.warmup_steps, self.d_steps)
        old_scale = torch.rsqrt(old_var + self.eps)
        r = torch.sqrt(var + self.eps) * old_scale
        d = (mean - old_mean) * old_scale
        r = torch.minimum(torch.maximum(r, 1 / r_bound), r_bound)
        return r, torch.minimum(torch.maximum(d, -d_bound), d_bound)
