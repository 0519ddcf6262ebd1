"""Learned mixtures of batch norm with norms that pool within a sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.norms.affine import NO_AFFINE, Affine, over_channels
from normexp.norms.batch import RunningMomentsNorm
from normexp.norms.group import group_norm, refuse_one_position
from normexp.norms.moments import Moments, measure, pool


class SwitchableNorm(RunningMomentsNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias, each moment a mixture of three.

    mean = sum_k w_k mean_k, with w the softmax of `mean_weight` (3,), and var likewise with
    `var_weight`, over the moments of a channel of a sample (instance norm), of a sample (layer
    norm) and of a channel (batch norm, by its running averages in evaluation), in this order. A
    sample with one position has no moments of its channels: the other two are mixed.
    arXiv:1806.10779.

    The authors' code (switchablenorms/Switchable-Normalization) takes the unbiased variance over a
    sample's positions and, for (N, C), of all three; here it is biased, as in the paper. Its
    evaluation may pool many batches instead of the running averages; that is evaluate_with=precise.
    """

    def add_state(self) -> None:
        super().add_state()
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        own = measure(x, real, tuple(range(3, x.ndim)))  # (G, N, C, 1, ...)
        batch = pool(own, dim=1)
        self.advance(batch)
        return self._mix(x, own, batch.mean, batch.var, affine)

    def normalize_by_running(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        own = measure(x, real, tuple(range(3, x.ndim)))
        mean, var = self.averages_like(x)
        return self._mix(x, own, mean, var, affine)

    def _mix(
        self, x: Tensor, own: Moments, batch_mean: Tensor, batch_var: Tensor, affine: Affine
    ) -> Tensor:
        layer_mean = own.mean.mean(dim=2, keepdim=True)
        between = (own.mean - layer_mean).square()
        layer_var = (own.var + between).mean(dim=2, keepdim=True)
        means = [own.mean, layer_mean, batch_mean]
        variances = [own.var, layer_var, batch_var]
        first = 1 if x.shape[3:].numel() == 1 else 0
        mean = _mixture(self.mean_weight[first:].to(x.dtype), means[first:])
        var = _mixture(self.var_weight[first:].to(x.dtype), variances[first:])
        return affine.apply(x - mean, torch.rsqrt(var + self.eps), axis=2)


def _mixture(logits: Tensor, moments: list[Tensor]) -> Tensor:
    parts = zip(logits.softmax(dim=0), moments, strict=True)
    first, *others = (weight * moment for weight, moment in parts)
    return sum(others, first)


class BatchInstanceNorm(RunningMomentsNorm):
    """(rho * z_batch + (1 - rho) * z_instance) * weight + bias, rho in [0, 1] learned per channel.

    z_batch is batch norm, by the running averages in evaluation; z_instance standardizes each
    channel of each sample, as instance norm. rho (C,) starts at 0.99, nearly batch norm.
    arXiv:1805.07925.

    The authors' code (hyseob/Batch-Instance-Normalization) starts at 1, where no probe before the
    training could detect that positions are pooled. It clips rho after every optimizer step, and
    gives it ten times the learning rate. A norm does not see the optimizer: here rho is `gate`
    clipped in the forward, with the gradient of the unclipped value.

    Raises:
        UserError: as `RunningNorm`; in forward, an input with one position.
    """

    def add_state(self) -> None:
        super().add_state()
        self.gate = nn.Parameter(torch.full((self.num_features,), 0.99))

    def refuse(self, shape: torch.Size) -> None:
        refuse_one_position(shape, "batch-instance norm", "norm=batch")

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        by_instance = self._by_instance(x, real)
        by_batch = self.normalize_as_batch_norm(x, real, NO_AFFINE)
        return self._mix(by_batch, by_instance, affine)

    def normalize_by_running(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        self.refuse(x.shape[1:])
        by_instance = self._by_instance(x, real)
        by_batch = super().normalize_by_running(x, real, NO_AFFINE)
        return self._mix(by_batch, by_instance, affine)

    def _by_instance(self, x: Tensor, real: Tensor | None) -> Tensor:
        real = None if real is None else real.flatten(0, 1)
        out = group_norm(x.flatten(0, 1), real, self.num_features, NO_AFFINE, self.eps)
        return out.unflatten(0, x.shape[:2])

    def _mix(self, by_batch: Tensor, by_instance: Tensor, affine: Affine) -> Tensor:
        gate = self.gate.to(by_batch.dtype)
        rho = over_channels(gate + (gate.clamp(0, 1) - gate).detach(), by_batch, axis=2)
        return affine.apply(rho * by_batch + (1 - rho) * by_instance, axis=2)
