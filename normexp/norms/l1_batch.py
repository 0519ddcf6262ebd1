"""Batch normalization by the mean absolute deviation."""

from __future__ import annotations

import math

from torch import Tensor

from normexp.norms.affine import Affine, over_channels
from normexp.norms.batch import RunningNorm, group_dims
from normexp.norms.moments import centre, measure_mean

# For a normal distribution, the standard deviation over the mean absolute deviation.
GAUSSIAN = math.sqrt(math.pi / 2)


class L1BatchNorm(RunningNorm):
    """(x - mean) / (s + eps) * weight + bias, s = sqrt(pi / 2) * mean(|x - mean|), as batch norm.

    Pools all samples and positions, without a square or a root. Evaluation uses the running
    averages of mean and s, without a correction for the number of values. L1BN of arXiv:1802.09769;
    arXiv:1803.01814 has the factor, with which s is the standard deviation of a normal distribution
    (and does not mention eps); the former has it in its analysis alone, and leaves it to `weight`.

    For a step in parts or in ghost groups, s is averaged over the parts, each about its own mean.
    """

    averages = {"running_mean": 0.0, "running_deviation": 1.0}
    running_mean: Tensor
    running_deviation: Tensor

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        dims = group_dims(x)
        mean, count = measure_mean(x, real, dims)
        centred = centre(x, mean, real)
        absolute, _ = measure_mean(centred.abs(), real, dims)
        deviation = GAUSSIAN * absolute
        self.move_averages(count, running_mean=mean, running_deviation=deviation)
        return affine.apply(centred, 1 / (deviation + self.eps), axis=2)

    def normalize_by_running(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        averages = (self.running_mean, self.running_deviation)
        mean, deviation = (over_channels(one.to(x.dtype), x, axis=2) for one in averages)
        return affine.apply(x - mean, 1 / (deviation + self.eps), axis=2)
