"""Batch norm evaluated as if each sample were in a batch of training."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.norms.batch import BatchNorm
from normexp.norms.variant import measure_samples, over_groups, scale_and_shift


class EvalNorm(BatchNorm):
    """Batch norm in training; in evaluation each sample's own moments take part as they did there.

    Shape (N, C, *) in and out, statistics in float32 or wider. With m_i, v_i the moments of sample
    i over its positions, m, v the running averages and a = 1/B, evaluation normalizes by

        mean_i = a m_i + (1 - a) m,    var_i = a v_i + (1 - a) v + a (1 - a) (m_i - m)^2,

    the moments of a batch of B samples of which i is one and the others are as all are: those under
    which training saw it. For large B it is batch norm. B is not set but measured: a is the running
    average of 1 over the samples that shared statistics in training, 1/2 before any.

    EvalNorm, arXiv:1904.06031, learns its weights per layer with a loss of its own, to give what
    training gave; a = 1/B is where such a fit would be for samples without noise.
    epfml/ghost-noise takes 1/B^2, and the biased variance, in its running averages too.

    Raises:
        UserError: as `BatchNorm`.
    """

    running_mean: Tensor
    running_var: Tensor
    running_share: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.register_buffer("running_share", torch.tensor(0.5))

    def normalize_by_batch(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        with torch.no_grad():
            step = self.num_batches_tracked + 1
            factor = self._factor(step, self.running_share.dtype)
            self.running_share.mul_(1 - factor).add_(factor * _share(x, mask))
        return super().normalize_by_batch(x, mask, weight, bias)

    def normalize_by_running(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        means, variances, _ = measure_samples(x, mask)  # (G, N, C, 1, ...)
        averages = (self.running_mean, self.running_var)
        mean, var = (over_groups(average.to(x.dtype), x) for average in averages)
        share = self.running_share.to(x.dtype).clamp(max=1)
        between = share * (1 - share) * (means - mean).square()
        var = share * variances + (1 - share) * var + between
        centred = x - (share * means + (1 - share) * mean)
        return scale_and_shift(centred, torch.rsqrt(var + self.eps), weight, bias)


def _share(x: Tensor, mask: Tensor | None) -> float | Tensor:
    """1 over the samples per group of x (G, N, C, *) that have a real position."""
    if mask is None:
        return 1 / x.shape[1]
    samples = mask.unsqueeze(-1).flatten(2).any(dim=2).sum(dim=1)  # (G,)
    return (1 / samples.clamp(min=1).to(x.dtype)).mean()
