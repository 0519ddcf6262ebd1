"""Batch renormalization: batch norm corrected towards its running averages while it trains."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.moments import Moments, normalize_groups
from normexp.norms.variant import BatchVariant, Factors, as_before, over_groups


class BatchRenorm(BatchVariant):
    """((x - mean) / std * r + d) * weight + bias, moments over all samples and positions.

    Shape (N, C, *) in and out, statistics in float32 or wider. With std = sqrt(var + eps), of the
    batch (B) and of the running averages before the step (R),

        r = clip(std_B / std_R, 1 / r_max, r_max),  d = clip((mean_B - mean_R) / std_R, +-d_max),

    through which no gradient flows. Where neither is clipped, training gives what evaluation by
    those averages would. For `warmup` steps r = 1 and d = 0, batch norm; then the bounds grow
    linearly. arXiv:1702.03275: 5000 steps of batch norm, r_max to 3 at step 40000, d_max to 5 at
    25000, momentum 0.01. Evaluation as batch norm.

    Implementations differ in what they average: the paper the biased std, ludvb/batchrenorm that
    with eps added to it and not under the root; here it is the variance, unbiased, as in batch
    norm, whose precise statistics and merged parts then hold here too.

    Args:
        r_max, d_max: final bounds.
        warmup: training steps with batch norm alone.
        r_ramp_end, d_ramp_end: the steps at which the bounds reach their final values.

    Raises:
        UserError: as `BatchNorm`; bounds or steps that make no ramp.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

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
                f"r_max={r_max}, d_max={d_max} are no bounds; r_max is 1 or more, d_max 0 or more: "
                "try norm.r_max=3 norm.d_max=5"
            )
        for key, end in (("r_ramp_end", r_ramp_end), ("d_ramp_end", d_ramp_end)):
            if not 0 <= warmup <= end:
                raise UserError(
                    f"{key}={end} lies before warmup={warmup}; try norm.{key}={10 * max(warmup, 1)}"
                )
        self.r_max, self.d_max = r_max, d_max
        self.warmup, self.r_ramp_end, self.d_ramp_end = warmup, r_ramp_end, d_ramp_end

    def extra_repr(self) -> str:
        steps = f"warmup={self.warmup}, ramps to {self.r_ramp_end} and {self.d_ramp_end}"
        return f"{super().extra_repr()}, r_max={self.r_max}, d_max={self.d_max}, {steps}"

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        real = None if mask is None else mask.unsqueeze(2)
        out, moments = normalize_groups(x, real, None, None, self.eps)
        r, d = self._corrections(moments)
        return Factors(torch.addcmul(over_groups(d, x), out, over_groups(r, x)), None), moments

    @torch.no_grad()
    def _corrections(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """r and d (G, C) of the step to come."""
        mean, var, _ = moments
        old_mean, old_var = (as_before(old, mean.dtype) for old in self.running_moments(mean))
        step = as_before(self.num_batches_tracked, mean.dtype) + 1
        r_bound = 1 + (self.r_max - 1) * self._progress(step, self.r_ramp_end)
        d_bound = self.d_max * self._progress(step, self.d_ramp_end)
        old_scale = torch.rsqrt(old_var + self.eps)
        r = torch.sqrt(var + self.eps) * old_scale
        d = (mean - old_mean) * old_scale
        r = torch.minimum(torch.maximum(r, 1 / r_bound), r_bound)
        return r, torch.minimum(torch.maximum(d, -d_bound), d_bound)

    def _progress(self, step: Tensor, end: int) -> Tensor:
        """0 until the `warmup`-th step, counted from 1, then linearly to 1 at the `end`-th."""
        return ((step - self.warmup) / max(end - self.warmup, 1)).clamp(0, 1)
