"""Batch-instance normalization: each channel learns how much of its style to keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.group import normalize_within_samples
from normexp.norms.variant import over_groups, scale_and_shift


class BatchInstanceNorm(BatchNorm):
    """(rho * z_batch + (1 - rho) * z_instance) * weight + bias, rho in [0, 1] learned per channel.

    Shape (N, C, *) in and out with more than one position, statistics in float32 or wider. z_batch
    is batch norm, by the running averages in evaluation; z_instance standardizes each channel of
    each sample, as instance norm. rho (C,) starts at 0.99, nearly batch norm. arXiv:1805.07925.

    The authors' code (hyseob/Batch-Instance-Normalization) starts at 1, where no measurement before
    a training would see the positions that are pooled. It clips rho after every step of the
    optimizer, and gives it ten times the learning rate. A norm does not see the optimizer: here rho
    is `gate` clipped in the forward, through which its gradient passes as if it were not.

    Raises:
        UserError: as `BatchNorm`; or the input has one position.
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
        self.gate = nn.Parameter(torch.full((num_features,), 0.99))

    def normalize_by_batch(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        by_instance = self._by_instance(x, mask)
        by_batch = super().normalize_by_batch(x, mask, None, None)
        return self._mix(by_batch, by_instance, weight, bias)

    def normalize_by_running(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        by_instance = self._by_instance(x, mask)
        by_batch = super().normalize_by_running(x, mask, None, None)
        return self._mix(by_batch, by_instance, weight, bias)

    def _by_instance(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if x.shape[3:].numel() == 1:
            raise UserError(
                f"batch-instance norm needs positions to pool, and an input of shape "
                f"{tuple(x.shape[1:])} has one; try norm=batch, or norm.view=sequence for tokens"
            )
        own = None if mask is None else mask.flatten(0, 1)
        return normalize_within_samples(
            x.flatten(0, 1), own, self.num_features, None, None, eps=self.eps
        ).unflatten(0, x.shape[:2])

    def _mix(
        self, by_batch: Tensor, by_instance: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        gate = self.gate.to(by_batch.dtype)
        rho = over_groups(gate + (gate.clamp(0, 1) - gate).detach(), by_batch)
        return scale_and_shift(rho * by_batch + (1 - rho) * by_instance, None, weight, bias)
