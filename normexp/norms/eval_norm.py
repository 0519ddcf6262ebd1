"""Batch norm evaluated as if each sample were in a training batch."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.norms.affine import Affine
from normexp.norms.batch import RunningMomentsNorm
from normexp.norms.moments import measure


class EvalNorm(RunningMomentsNorm):
    """Batch norm in training; in evaluation a sample's own moments keep their training weight.

    With m_i, v_i the moments of sample i over its positions, m, v the running averages and
    a = 1/B, evaluation normalizes by

        mean_i = a m_i + (1 - a) m,    var_i = a v_i + (1 - a) v + a (1 - a) (m_i - m)^2,

    the moments of a batch of sample i and B - 1 average others, as in training. For large B it is
    batch norm. B is measured, not set: a is the running average of 1 over the number of samples
    that shared statistics in training, and 1/2 before training.

    EvalNorm, arXiv:1904.06031, learns its weights per layer with an extra loss, to reproduce the
    outputs of training; without noise this would give a = 1/B. epfml/ghost-noise uses 1/B^2, and
    the biased variance in its running averages.
    """

    running_share: Tensor

    def add_state(self) -> None:
        super().add_state()
        self.register_buffer("running_share", torch.tensor(0.5))

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        with torch.no_grad():
            weight = self.new_weight(self.num_batches_tracked + 1, self.running_share.dtype)
            self.running_share.mul_(1 - weight).add_(weight * _share(x, real))
        return self.normalize_as_batch_norm(x, real, affine)

    def normalize_by_running(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        means, variances, _ = measure(x, real, tuple(range(3, x.ndim)))  # (G, N, C, 1, ...)
        mean, var = self.averages_like(x)
        share = self.running_share.to(x.dtype).clamp(max=1)
        between = share * (1 - share) * (means - mean).square()
        var = share * variances + (1 - share) * var + between
        centred = x - (share * means + (1 - share) * mean)
        return affine.apply(centred, torch.rsqrt(var + self.eps), axis=2)


def _share(x: Tensor, real: Tensor | None) -> float | Tensor:
    """Returns 1 over the number of samples per group of x (G, N, C, *) with a real position."""
    if real is None:
        return 1 / x.shape[1]
    samples = real.flatten(2).any(dim=2).sum(dim=1)  # (G,)
    return (1 / samples.clamp(min=1).to(x.dtype)).mean()
