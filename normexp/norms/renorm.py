"""Batch renormalization: batch norm corrected towards its running averages while it trains."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.affine import NO_AFFINE, Affine
from normexp.norms.batch import RunningMomentsNorm, before_step, normalize_groups
from normexp.norms.moments import Moments


class BatchRenorm(RunningMomentsNorm):
    """((x - mean) / std * r + d) * weight + bias, moments over all samples and positions.

    With std = sqrt(var + eps), of the batch (B) and of the running averages before the step (R),

        r = clip(std_B / std_R, 1 / r_max, r_max),  d = clip((mean_B - mean_R) / std_R, +-d_max),

    through which no gradient flows. Where neither is clipped, training gives what evaluation with
    those averages would. For `warmup` steps r = 1 and d = 0, batch norm; then the bounds grow
    linearly. arXiv:1702.03275: 5000 steps of batch norm, r_max to 3 at step 40000, d_max to 5 at
    25000, momentum 0.01. Evaluation as batch norm.

    Implementations differ in what they average: the paper the biased std, ludvb/batchrenorm the std
    with eps added outside the root; here it is the unbiased variance, as in batch norm, so that
    precise statistics and the merging of parts hold here too.

    Args:
        r_max, d_max: final bounds.
        warmup: training steps with batch norm alone.
        r_ramp_end, d_ramp_end: the steps at which the bounds reach their final values.

    Raises:
        UserError: as `RunningNorm`; bounds or steps that make no ramp.
    """

    def __init__(
        self,
        num_features: int,
        *,
        r_max: float,
        d_max: float,
        warmup: int,
        r_ramp_end: int,
        d_ramp_end: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        if r_max < 1 or d_max < 0:
            raise UserError(
                f"r_max={r_max}, d_max={d_max}: r_max must be 1 or more, d_max 0 or more; "
                "try norm.r_max=3 norm.d_max=5"
            )
        for key, end in (("r_ramp_end", r_ramp_end), ("d_ramp_end", d_ramp_end)):
            if not 0 <= warmup <= end:
                raise UserError(
                    f"{key}={end} lies before warmup={warmup}; try norm.{key}={10 * max(warmup, 1)}"
                )
        self.r_max, self.d_max = r_max, d_max
        self.warmup, self.r_ramp_end, self.d_ramp_end = warmup, r_ramp_end, d_ramp_end

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
        r_bound = 1 + (self.r_max - 1) * self._progress(step, self.r_ramp_end)
        d_bound = self.d_max * self._progress(step, self.d_ramp_end)
        old_scale = torch.rsqrt(old_var + self.eps)
        r = torch.sqrt(var + self.eps) * old_scale
        d = (mean - old_mean) * old_scale
        r = torch.minimum(torch.maximum(r, 1 / r_bound), r_bound)
        return r, torch.minimum(torch.maximum(d, -d_bound), d_bound)

    def _progress(self, step: Tensor, end: int) -> Tensor:
        """Returns 0 until the `warmup`-th step, counted from 1, rising to 1 at the `end`-th."""
        return ((step - self.warmup) / max(end - self.warmup, 1)).clamp(0, 1)
