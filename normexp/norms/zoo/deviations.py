"""Norms with a mistake that is common in tutorials, to train and see what it costs.

The docstrings say what the mistake changes; n is the number of values per statistic.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.base import (
    Affine,
    AffineNorm,
    Moments,
    centre,
    knobs,
    measure,
    measure_mean,
    unbiased,
)
from normexp.norms.contract import Mask
from normexp.norms.running import RunningMomentsNorm, group_dims
from normexp.norms.sequence import BatchNormPerPosition


class DeviatingBatchNorm(RunningMomentsNorm):
    """Abstract: batch norm whose moments or scale a subclass computes differently."""

    def measure(self, x: Tensor, real: Mask) -> Moments:
        return measure(x, real, group_dims(x))

    def scale(self, var: Tensor, _count: int | Tensor, /) -> Tensor:
        """Returns the factor of x - mean in training."""
        return torch.rsqrt(var + self.eps)

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        mean, var, count = moments = self.measure(x, real)
        self.advance(moments)
        return affine.apply(centre(x, mean, real), self.scale(var, count), axis=2)


class BatchNormUnbiased(DeviatingBatchNorm):
    """Batch norm that divides by the root of the unbiased variance, n / (n - 1) times the biased.

    Training outputs are sqrt((n - 1) / n) times batch norm's: 0.707 at n = 2, 0.935 at 8, 0.984 at
    32. Evaluation is the same as batch norm's, so the mistake looks like sensitivity to batch size.
    """

    def scale(self, var: Tensor, count: int | Tensor) -> Tensor:
        return torch.rsqrt(unbiased(var, count) + self.eps)


class BatchNormEpsOutside(DeviatingBatchNorm):
    """(x - mean) / (sqrt(var) + eps) * weight + bias: eps added to the root and not under it.

    With eps 1e-5, outputs of small channels grow: they are 1.048 times batch norm's at a deviation
    of 0.01 and 3.3 times at 0.001. At 0 a gradient may reach 1 / eps = 100 000, not 1 / sqrt(eps).
    """

    def scale(self, var: Tensor, _: int | Tensor) -> Tensor:
        # The root has no gradient at 0; the clamp's gradient is 0 below the smallest normal number.
        return 1 / (var.clamp(min=torch.finfo(var.dtype).tiny).sqrt() + self.eps)

    def normalize_by_running(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        mean, var = self.averages_like(x)
        return affine.apply(centre(x, mean, real), self.scale(var, 1), axis=2)


class BatchNormBiasedAverage(RunningMomentsNorm):
    """Batch norm whose running variance averages the biased variance of the batches.

    In evaluation the variance is (n - 1) / n of what it should be: 0.5 at n = 2, 0.875 at 8, 0.996
    at 256.
    """

    unbiased_running_var = False


class BatchNormNaiveVariance(DeviatingBatchNorm):
    """Batch norm with var = mean(x^2) - mean(x)^2, in float32 or wider.

    At a deviation of 1 and a mean of 1000, the variance is off by about 0.1; at a mean of 10 000 it
    may be negative, and the output NaN.
    """

    def measure(self, x: Tensor, real: Mask) -> Moments:
        mean, count = measure_mean(x, real, group_dims(x))
        square, _ = measure_mean(x.square(), real, group_dims(x))
        return Moments(mean, square - mean.square(), count)


@knobs
class BatchNormNoEps(DeviatingBatchNorm):
    """(x - mean) / sqrt(var) * weight + bias: batch norm without eps.

    Outputs are sqrt(1 + eps / var) times batch norm's: 1.4 percent more at a variance of 3.5e-4 and
    eps 1e-5. A constant channel, as after a dead ReLU, is 0 / 0: NaN, and training cannot recover.
    """

    eps: float = field(default=0.0, init=False)

    def scale(self, var: Tensor, count: int | Tensor) -> Tensor:
        return torch.rsqrt(one_if_empty(var, count))


@knobs
class BatchNormFlattened(BatchNormPerPosition):
    """Batch norm of C * T features: each position has its own statistics, weight and bias.

    Batch norm over the first axis of (N, T, C) has 2 * C * T parameters instead of 2 * C,
    statistics over N values instead of N * T, and a fixed length. `norm=batch_per_position` has the
    same statistics, but a weight and a bias per channel.
    """

    affine: bool = field(default=False, init=False)

    def add_state(self) -> None:
        super().add_state()
        shape = (self.num_positions, self.num_features)
        self.position_weight = nn.Parameter(torch.ones(shape))
        self.position_bias = nn.Parameter(torch.zeros(shape))

    def affine_of_features(self, x: Tensor, _: Affine) -> Affine:
        rows = (self.position_weight, self.position_bias)
        return Affine(*[row[: x.shape[-1]].flatten().to(x.dtype) for row in rows])


class LayerNormUnbiased(AffineNorm):
    """Layer norm that divides by the root of the unbiased variance, D / (D - 1) times the biased.

    D is the number of pooled values, all channels and positions as in `LayerNorm`. Outputs are
    sqrt((D - 1) / D) times layer norm's: 0.866 at D = 4, 0.992 at 64. `weight` can undo this
    constant.
    """

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if x.shape[1:].numel() == 1:
            raise UserError(
                f"an unbiased variance needs 2 values or more, and an input of shape "
                f"{tuple(x.shape)} has one per sample; try norm=layer"
            )
        mean, var, count = measure(x, real, tuple(range(1, x.ndim)))
        scale = torch.rsqrt(unbiased(var, count) + self.eps)
        return affine.apply(centre(x, mean, real), scale)


@knobs
class LayerNormNoEps(AffineNorm):
    """(x - mean) / sqrt(var) * weight + bias: layer norm without eps.

    It costs what `BatchNormNoEps` does, for a sample in place of a channel.
    """

    eps: float = field(default=0.0, init=False)

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        mean, var, count = measure(x, real, tuple(range(1, x.ndim)))
        return affine.apply(centre(x, mean, real), torch.rsqrt(one_if_empty(var, count)))


def one_if_empty(var: Tensor, count: int | Tensor) -> Tensor:
    """Returns `var`, or 1 over padding alone, where the output is then 0 and not 0 / 0."""
    return torch.where(count > 0, var, 1) if isinstance(count, Tensor) else var
