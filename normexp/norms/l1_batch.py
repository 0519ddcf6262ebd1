"""Batch normalization by the mean absolute deviation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normexp.norms.moments import Moments
from normexp.norms.state import State
from normexp.norms.variant import (
    BatchVariant,
    Factors,
    at_least_one,
    average_parts,
    centred,
    measure_means,
    over_groups,
    pool_means,
    sum_groups,
)

# Of a normal distribution, the standard deviation by the mean absolute deviation.
GAUSSIAN = math.sqrt(math.pi / 2)


class L1BatchNorm(BatchVariant):
    """(x - mean) / (s + eps) * weight + bias, s = sqrt(pi / 2) * mean(|x - mean|), as batch norm.

    Shape (N, C, *) in and out, statistics in float32 or wider, over all samples and positions; no
    square and no root. Evaluation by the running averages of mean and s, both as they are: there is
    no correction for the number of values. L1BN of arXiv:1802.09769; with the factor, by which s is
    the standard deviation of a normal distribution, arXiv:1803.01814 (where eps is not mentioned).
    The former has the factor in its analysis alone, and leaves it to `weight`.

    A step in parts, or in ghost groups, averages s of the parts, each about its own mean.

    Raises:
        UserError: as `BatchNorm`.
    """

    running_mean: Tensor
    running_deviation: Tensor
    num_batches_tracked: Tensor
    num_values: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.running_var = None
        self.register_buffer("running_deviation", torch.ones(num_features))

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        mean, count = measure_means(x, mask)
        out = centred(x, mean, mask)
        deviation = GAUSSIAN * sum_groups(out.abs()) / at_least_one(count)
        scale = over_groups(1 / (deviation + self.eps), x)
        return Factors(out, scale), Moments(mean, deviation, count)

    def standardize_by_running(self, x: Tensor, mask: Tensor | None) -> Factors:
        del mask
        mean, deviation = self.running_mean.to(x.dtype), self.running_deviation.to(x.dtype)
        return Factors(x - over_groups(mean, x), over_groups(1 / (deviation + self.eps), x))

    @torch.no_grad()
    def advance(self, moments: Moments) -> None:
        mean, deviation, count = pool_means(moments)
        factor = self.advance_counters(count, mean.dtype)
        self.running_mean.mul_(1 - factor).add_(factor * mean)
        self.running_deviation.mul_(1 - factor).add_(factor * deviation)

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """Means over the parts, weighted by their numbers of values."""
        del shares
        return average_parts(("running_mean", "running_deviation"), start, parts)
