"""What batch norms by the mean of squares share: power norm and moving average batch norm.

Their backward pass takes averages over steps as their forward pass does, and moves them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normexp.norms.moments import Moments
from normexp.norms.state import State
from normexp.norms.variant import (
    BatchVariant,
    Factors,
    at_least_one,
    average_parts,
    over_groups,
    pool_means,
    refuse_no_momentum,
    sum_groups,
)


class SquareNorm(BatchVariant):
    """x / sqrt(q + eps) * weight + bias, q a mean of x^2; in evaluation its running average.

    Args:
        name: what an error calls the norm.

    Raises:
        UserError: as `BatchNorm`; no momentum.
    """

    momentum: float
    running_square: Tensor
    num_batches_tracked: Tensor
    num_values: Tensor
    averages = ("running_square",)  # the names of the buffers that a step in parts averages

    def __init__(
        self, num_features: int, *, name: str, eps: float, momentum: float, affine: bool
    ) -> None:
        refuse_no_momentum(momentum, name)
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.running_mean = self.running_var = None
        self.register_buffer("running_square", torch.ones(num_features))

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={affine}"

    def standardize_by_running(self, x: Tensor, mask: Tensor | None) -> Factors:
        del mask
        scale = torch.rsqrt(self.running_square.to(x.dtype) + self.eps)
        return Factors(x, over_groups(scale, x))

    @torch.no_grad()
    def advance(self, moments: Moments) -> None:
        _, square, count = pool_means(moments)
        factor = self.advance_counters(count, square.dtype)
        self.running_square.mul_(1 - factor).add_(factor * square)

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """Means over the parts, weighted by their numbers of values."""
        del shares
        return average_parts(self.averages, start, parts)


class ScaleByPast(torch.autograd.Function):
    """z = x * scale; its backward pass has a memory of its own.

    With g the gradient of z (G, N, C, *) and P (G, C) the group's mean of g z,

        gradient of x = (g - (kept + share * P) z) * scale,   past <- decay * past + step * P,

    P in the latter of all groups. Scale is (G, C), counts (G, 1) the values that a mean is of; the
    others broadcast to these, or to past. No gradient flows through any of them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        scale: Tensor,
        counts: Tensor,
        kept: Tensor,
        share: Tensor,
        past: Tensor,
        decay: Tensor,
        step: Tensor,
    ) -> Tensor:
        del counts, kept, share, past, decay, step
        return x * over_groups(scale, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, counts, kept, share, past, decay, step = ctx.saved_tensors
        (g,) = grads
        products = sum_groups(g * z) / at_least_one(counts)
        used = kept + share * products  # (G, C)
        grad = (g - over_groups(used, z) * z) * over_groups(scale, z)
        pooled = (counts * products).sum(dim=0) / at_least_one(counts.sum(dim=0))
        past.copy_(decay * past.to(z.dtype) + step * pooled)
        return grad, *[None] * 7
