"""Batch renormalization: batch norm corrected towards its running averages while it trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.affine import NO_AFFINE, Affine
from normexp.norms.batch import RunningMomentsNorm, before_step, normalize_groups
from normexp.norms.moments import Moments
from normexp.norms.ramps import NUM_TRAINING_STEPS, rise, steps_of


@dataclass(eq=False, repr=False, kw_only=True)
class BatchRenorm(RunningMomentsNorm):
    """((x - mean) / std * r + d) * weight + bias, moments over all samples and positions.

    With std = sqrt(var + eps), of the batch (B) and of the running averages before the step (R),

        r = clip(std_B / std_R, 1 / r_max, r_max),  d = clip((mean_B - mean_R) / std_R, +-d_max),

    through which no gradient flows. Where neither is clipped, training gives what evaluation with
    those averages would. Up to the share `warmup` of the training r = 1 and d = 0, batch norm; then
    the bounds grow linearly. Evaluation as batch norm. arXiv:1702.03275: batch norm for 5000 steps,
    r_max to 3 at step 40000, d_max to 5 at 25000, momentum 0.01. The shares of conf/norm stand to
    each other as these do, 1 : 8 : 5.

    Implementations differ in what they average: the paper the biased std, ludvb/batchrenorm the std
    with eps added outside the root; here it is the unbiased variance, as in batch norm, so that
    precise statistics and the merging of parts hold here too.

    Args:
        r_max, d_max: final bounds.
        warmup: share of the training with batch norm alone.
        r_ramp_end, d_ramp_end: shares of the training after which the bounds have their final
            values.
        num_training_steps: of the whole training.

    Raises:
        UserError: as `RunningNorm`; bounds or shares that make no ramp.
    """

    r_max: float
    d_max: float
    warmup: float
    r_ramp_end: float
    d_ramp_end: float
    num_training_steps: int = NUM_TRAINING_STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r_max < 1 or self.d_max < 0:
            raise UserError(
                f"r_max={self.r_max}, d_max={self.d_max}: r_max must be 1 or more, d_max 0 or "
                "more; try norm.r_max=3 norm.d_max=5"
            )
        warmup, ends = self.warmup, {"r_ramp_end": self.r_ramp_end, "d_ramp_end": self.d_ramp_end}
        self.warmup_steps, self.r_steps, self.d_steps = steps_of(
            self.num_training_steps, warmup=warmup, **ends
        )
        for key, end in ends.items():
            if end < warmup:
                raise UserError(
                    f"{key}={end} lies before warmup={warmup}; try norm.{key}={warmup} or more"
                )

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        out, moments = normalize_groups(x, real, NO_AFFINE, self.eps)
        r, d = self._corrections(moments)
        self.advance(moments)
        return affine.apply(torch.addcmul(d, out, r), axis=2)

    @torch.no_grad()
    def _corrections(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Returns r and d of the coming step, shaped as the moments (G, 1, C, 1, ...)."""
        mean, var, _ = moments
        averages = (self.running_mean, self.running_var)
        old_mean, old_var = (before_step(old, mean.dtype).view(mean.shape[1:]) for old in averages)
        step = before_step(self.num_batches_tracked, mean.dtype) + 1
        r_bound = 1 + (self.r_max - 1) * rise(step, self.warmup_steps, self.r_steps)
        d_bound = self.d_max * rise(step, self.warmup_steps, self.d_steps)
        old_scale = torch.rsqrt(old_var + self.eps)
        r = torch.sqrt(var + self.eps) * old_scale
        d = (mean - old_mean) * old_scale
        r = torch.minimum(torch.maximum(r, 1 / r_bound), r_bound)
        return r, torch.minimum(torch.maximum(d, -d_bound), d_bound)
