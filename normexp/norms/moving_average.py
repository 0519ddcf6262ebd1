"""Moving average batch normalization, with averages in the forward and the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normexp.errors import UserError
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


class MovingAverageBatchNorm(BatchVariant):
    """x / sqrt(q + eps) * r * weight + bias, q the mean of x^2 over the last `memory` steps.

    Shape (N, C, *) in and out, statistics in float32 or wider, over all samples and positions. The
    newest of the q is the batch's own, and where a site splits the batch, each group's own. With Q
    the running average of the batches' mean of x^2, which evaluation uses,

        r = clip(sqrt(q + eps) / sqrt(Q + eps), 1 / r_max, r_max), without a gradient,

    and with g the gradient of z = x / sqrt(q + eps), that of x is (g - p z) / sqrt(q + eps), p the
    mean of (mean of g z) over the last `memory` steps. Until both `warmup` and `memory` steps
    have passed, q and p are those of the batch and r is 1. MABN, arXiv:2001.06838.

    It does not centre: the paper does that with the weights of the convolution before, which is not
    part of this. The authors' code (megvii-model/MABN) moves Q by q and not by the batch's own; it
    has r = 1 for 1000 steps in one place and 100 in another.

    Where the last group of a split is short, the averages of the backward pass keep their value of
    `memory` steps ago. A backward pass moves them, so each forward has to be followed by its own.

    Args:
        memory: steps in the moving average; samples in it over samples that share a statistic.
        momentum: weight of the new value in Q.
        warmup: steps with the statistics of the batch.

    Raises:
        UserError: as `BatchNorm`; a memory below one, an r_max below one.
    """

    running_square: Tensor
    past_squares: Tensor
    past_products: Tensor
    num_batches_tracked: Tensor
    num_values: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        memory: int,
        r_max: float,
        warmup: int,
        eps: float = 1e-5,
        momentum: float = 0.02,
        affine: bool = True,
    ) -> None:
        refuse_no_momentum(momentum, "moving average batch norm")
        if memory < 1 or r_max < 1:
            raise UserError(
                f"memory={memory}, r_max={r_max}: neither may be below one; "
                "try norm.memory=16 norm.r_max=5"
            )
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.memory, self.r_max, self.warmup = memory, r_max, warmup
        self.running_mean = self.running_var = None
        self.register_buffer("running_square", torch.ones(num_features))
        self.register_buffer("past_squares", torch.zeros(memory, num_features))
        self.register_buffer("past_products", torch.zeros(memory, num_features))

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={affine}, "
            f"memory={self.memory}, r_max={self.r_max}, warmup={self.warmup}"
        )

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Moments]:
        with torch.no_grad():
            square, count = measure_means(x.square(), mask)
            counts = x.new_zeros(len(x), 1) + count
            step = as_before(self.num_batches_tracked, torch.int64)
            warm = step < max(self.memory, self.warmup)
            newest = self._is_newest(step)
            past = as_before(self.past_squares, x.dtype)
            averaged = average_with(past, newest, square, warm)
            running = as_before(self.running_square, x.dtype)
            scale = torch.rsqrt(averaged + self.eps)  # (G, C)
            r = torch.rsqrt(running + self.eps) / scale
            r = torch.where(warm, 1, r.clamp(1 / self.r_max, self.r_max))
        out = _Scale.apply(x, scale, counts, warm, newest, self.past_products)
        assert isinstance(out, Tensor)
        return out * over_groups(r, x), Moments(square, square, count)

    def standardize_by_running(self, x: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        return x * over_groups(torch.rsqrt(self.running_square.to(x.dtype) + self.eps), x)

    def _is_newest(self, step: Tensor) -> Tensor:
        """Where step `step`, counted from 0, is among the last: (memory, 1), true at one place."""
        places = torch.arange(self.memory, device=step.device)
        return (places == step % self.memory)[:, None]

    @torch.no_grad()
    def advance(self, moments: Moments) -> None:
        _, square, count = pool_means(moments)
        newest = self._is_newest(self.num_batches_tracked)
        self.past_squares.copy_(torch.where(newest, square, self.past_squares))
        factor = self.advance_counters(count, square.dtype)
        self.running_square.mul_(1 - factor).add_(factor * square)

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """Means over the parts, weighted by their numbers of values."""
        del shares
        names = ("running_square", "past_squares", "past_products")
        return average_parts(names, start, parts)


def average_with(past: Tensor, newest: Tensor, own: Tensor, warm: Tensor) -> Tensor:
    """Mean (G, C) of the rows of past (memory, C), the newest by `own` (G, C); `own` where warm."""
    others = torch.where(newest, 0, past).sum(dim=0)
    return torch.where(warm, own, (others + own) / len(past))


class _Scale(torch.autograd.Function):
    """z = x * scale (G, C); backward as `MovingAverageBatchNorm` has it, which moves `past`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, counts: Tensor, warm: Tensor, newest: Tensor, past: Tensor
    ) -> Tensor:
        del counts, warm, newest, past
        return x * over_groups(scale, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, counts, warm, newest, past = ctx.saved_tensors
        (g,) = grads
        products = sum_groups(g * z) / at_least_one(counts)
        used = average_with(past.to(z.dtype), newest, products, warm)  # (G, C)
        grad = (g - over_groups(used, z) * z) * over_groups(scale, z)
        pooled = (counts * products).sum(dim=0) / at_least_one(counts.sum(dim=0))
        past.copy_(torch.where(newest, pooled, past))
        return grad, None, None, None, None, None
