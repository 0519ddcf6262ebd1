"""Switchable normalization: a learned mixture of the moments of instance, layer and batch norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.norms.moments import Moments, pool
from normexp.norms.variant import BatchVariant, Factors, measure_samples, over_groups


class SwitchableNorm(BatchVariant):
    """(x - mean) / sqrt(var + eps) * weight + bias, each moment a mixture of three.

    Shape (N, C, *) in and out, statistics in float32 or wider. mean = sum_k w_k mean_k, with w the
    softmax of `mean_weight` (3,), and var likewise by `var_weight`, over the moments of a channel
    of a sample (instance norm), of a sample (layer norm) and of a channel (batch norm, by its
    running averages in evaluation), in this order. A sample with one position has no moments of its
    channels: the other two are mixed. arXiv:1806.10779.

    The authors' code (switchablenorms/Switchable-Normalization) takes the unbiased variance over a
    sample's positions and, for (N, C), of all; biased here, as in the paper. Its evaluation may
    pool many batches in place of the running averages: that is evaluate_with=precise.

    Raises:
        UserError: as `BatchNorm`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        own = measure_samples(x, mask)
        by_sample = [part.flatten(2).movedim(1, 0) for part in own[:2]]  # (N, G, C)
        count = own.count
        if isinstance(count, Tensor):
            count = count.flatten(2).movedim(1, 0)
        batch = pool(Moments(by_sample[0], by_sample[1], count))
        out = self._mix(x, own, batch.mean, batch.var)
        count = batch.count
        return out, Moments(batch.mean.detach(), batch.var.detach(), count)

    def standardize_by_running(self, x: Tensor, mask: Tensor | None) -> Factors:
        return self._mix(x, measure_samples(x, mask), *self.running_moments(x))

    def _mix(self, x: Tensor, own: Moments, batch_mean: Tensor, batch_var: Tensor) -> Factors:
        """From the moments of samples (G, N, C, 1, ...) and those of the batch (G, C)."""
        layer_mean = own.mean.mean(dim=2, keepdim=True)
        between = (own.mean - layer_mean).square()
        layer_var = (own.var + between).mean(dim=2, keepdim=True)
        means = [own.mean, layer_mean, over_groups(batch_mean, x)]
        variances = [own.var, layer_var, over_groups(batch_var, x)]
        first = 1 if x.shape[3:].numel() == 1 else 0
        mean = _mixture(self.mean_weight[first:].to(x.dtype), means[first:])
        var = _mixture(self.var_weight[first:].to(x.dtype), variances[first:])
        return Factors(x - mean, torch.rsqrt(var + self.eps))


def _mixture(logits: Tensor, moments: list[Tensor]) -> Tensor:
    parts = zip(logits.softmax(dim=0), moments, strict=True)
    first, *others = (weight * moment for weight, moment in parts)
    return sum(others, first)
