"""Power normalization: batch norm's scale alone, by running averages, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normexp.norms.contract import State
from normexp.norms.moments import Moments
from normexp.norms.variant import (
    BatchVariant,
    as_before,
    at_least_one,
    average_parts,
    measure_means,
    over_groups,
    pool_means,
    refuse_no_momentum,
    sum_groups,
)


class PowerNorm(BatchVariant):
    """x / sqrt(q + eps) * weight + bias, q the running mean of x^2 before the step; not centred.

    Shape (N, C, *) in and out, statistics in float32 or wider, over all samples and positions. With
    z = x / sqrt(q + eps) and g the gradient of z, and a the momentum, after each step

        q  += a * (mean(x^2) - q),    nu += a * (mean(g z) - nu * mean(z^2)),

    and the gradient of x is (g - nu z) / sqrt(q + eps) by nu before the step: an approximation. For
    `warmup` steps q and nu are those of the batch, mean(x^2) and mean(g z), which is exact (PN-V).
    Evaluation by q. arXiv:2003.07845, algorithm 2, which has momentum 0.1.

    The authors' code (sIncerass/powernorm) differs: it first scales each token by its root mean
    square in groups of channels, divides the gradient by the deviation of the batch, counts with nu
    while it warms up, and warms up for 10000 steps. None of that is here.

    Where a site splits a batch into groups of which the last is short, nu stays as it was in that
    step. A backward pass moves it, so that each forward has to be followed by its own.

    Args:
        warmup: steps with the statistics of the batch.

    Raises:
        UserError: as `BatchNorm`.
    """

    running_square: Tensor
    running_product: Tensor
    num_batches_tracked: Tensor
    num_values: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        warmup: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        refuse_no_momentum(momentum, "power norm")
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.warmup = warmup
        self.running_mean = self.running_var = None
        self.register_buffer("running_square", torch.ones(num_features))
        self.register_buffer("running_product", torch.zeros(num_features))

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={affine}, "
            f"warmup={self.warmup}"
        )

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Moments]:
        with torch.no_grad():
            square, count = measure_means(x.square(), mask)
            warm = as_before(self.num_batches_tracked, torch.int64) < self.warmup
            old = as_before(self.running_square, x.dtype)
            scale = torch.rsqrt(torch.where(warm, square, old) + self.eps)
            counts = x.new_zeros(len(x), 1) + count
        momentum = self.momentum
        out = _Scale.apply(x, scale, counts, warm, self.running_product, momentum)
        assert isinstance(out, Tensor)
        return out, Moments(square, square, count)

    def standardize_by_running(self, x: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        return x * over_groups(torch.rsqrt(self.running_square.to(x.dtype) + self.eps), x)

    @torch.no_grad()
    def advance(self, moments: Moments) -> None:
        _, square, count = pool_means(moments)
        factor = self.advance_counters(count, square.dtype)
        self.running_square.mul_(1 - factor).add_(factor * square)

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """Means over the parts, weighted by their numbers of values."""
        del shares
        return average_parts(("running_square", "running_product"), start, parts)


class _Scale(torch.autograd.Function):
    """z = x * scale (G, C); backward as `PowerNorm` has it, which moves `product` (C,), its nu."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, counts: Tensor, warm: Tensor, product: Tensor, momentum: float
    ) -> Tensor:
        del counts, warm, product, momentum
        return x * over_groups(scale, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, scale, counts, warm, product, ctx.momentum = inputs
        ctx.save_for_backward(output, scale, counts, warm, product)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, counts, warm, product = ctx.saved_tensors
        (g,) = grads
        safe = at_least_one(counts)
        products, squares = sum_groups(g * z) / safe, sum_groups(z.square()) / safe
        old = product.to(z.dtype)
        used = torch.where(warm, products, old)  # (G, C)
        grad = (g - over_groups(used, z) * z) * over_groups(scale, z)
        total = counts.sum(dim=0)
        weights = counts / at_least_one(total)
        step = (weights * products).sum(dim=0) - old * (weights * squares).sum(dim=0)
        product.copy_(old + ctx.momentum * (total > 0).to(z.dtype) * step)
        return grad, None, None, None, None, None
