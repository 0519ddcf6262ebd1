"""Batch norms by the mean square that average over steps in the forward and the backward pass.

Neither centres. Both scale by statistics of earlier steps, and in the gradient replace the term of
the batch by an average that the backward pass moves, so each forward needs its backward.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.base import Affine, at_least_one, knobs, measure_mean, over_channels, pool_mean
from normexp.norms.contract import Mask
from normexp.norms.running import (
    NUM_TRAINING_STEPS,
    RunningNorm,
    before_step,
    group_dims,
    shares_to_steps,
)


class SquareNorm(RunningNorm):
    """Abstract: x * scale * weight + bias; evaluation scales by 1 / sqrt(running_square + eps)."""

    averages = {"running_square": 1.0}
    needs_momentum = True
    running_square: Tensor
    momentum: float

    def normalize_by_running(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        square = self.averages_like(x)[0]
        return affine.apply(x, torch.rsqrt(square + self.eps), axis=2)


class ScaleByPast(torch.autograd.Function):
    """z = x * scale; its backward pass keeps running averages.

    With g the gradient of z (G, N, C, *), P (G, 1, C, 1, ...) each group's mean of g z, and Q (C,)
    the mean of g z over all groups,

        gradient of x = (g - (kept + share * P) z) * scale,   past <- decay * past + step * Q.

    `counts` (G, 1, ...) is the number of values behind P; `kept` is (C, 1, ...), and `decay` and
    `step` broadcast to `past`, whose last axis is C. No gradient flows through any of them.
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
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, counts, kept, share, past, decay, step = ctx.saved_tensors
        (g,) = grads
        products = (g * z).sum(dim=group_dims(z), keepdim=True) / at_least_one(counts)
        grad = (g - (kept + share * products) * z) * scale
        pooled = (counts * products).sum(dim=0) / at_least_one(counts.sum(dim=0))
        past.copy_(decay * past.to(z.dtype) + step * pooled.flatten())
        return grad, *[None] * 7


@knobs
class PowerNorm(SquareNorm):
    """x / sqrt(q + eps) * weight + bias, q the running mean of x^2 before the step.

    Pools all samples and positions. With z = x / sqrt(q + eps) and g the gradient of z, and a the
    momentum, after each step

        q  += a * (mean(x^2) - q),    nu += a * (mean(g z) - nu * mean(z^2)),

    and the gradient of x is (g - nu z) / sqrt(q + eps) with nu before the step, an approximation.
    Up to the share `warmup` of the training q and nu are those of the batch, mean(x^2) and
    mean(g z), and the gradient is exact (PN-V). Evaluation by q. arXiv:2003.07845, algorithm 2,
    which has momentum 0.1.

    The authors' code (sIncerass/powernorm) differs: it first scales each token by its root mean
    square in groups of channels, divides the gradient by the deviation of the batch, applies nu in
    the warm-up too, and warms up for 10000 steps.

    If a site splits a batch into groups and the last is short, nu does not move in that step.

    Args:
        warmup: share of the training with the statistics of the batch.
    """

    warmup: float
    num_training_steps: int = NUM_TRAINING_STEPS
    averages = {"running_square": 1.0, "running_product": 0.0}
    running_product: Tensor = field(init=False)

    def check_knobs(self) -> None:
        super().check_knobs()
        (self.warmup_steps,) = shares_to_steps(self.num_training_steps, warmup=self.warmup)

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        with torch.no_grad():
            square, count = measure_mean(x.square(), real, group_dims(x))
            counts = torch.zeros_like(square[:, :, :1]) + count
            is_warmup = before_step(self.num_batches_tracked, torch.int64) < self.warmup_steps
            old = over_channels(before_step(self.running_square, x.dtype), x, axis=2)
            scale = torch.rsqrt(torch.where(is_warmup, square, old) + self.eps)  # (G, 1, C, 1, ...)
            kept = torch.where(is_warmup, 0, self.running_product.to(x.dtype))
            kept = over_channels(kept, x, axis=2)
            z_square, _ = pool_mean(scale.square() * square, counts, dim=0)
            step = self.momentum * (counts.sum(dim=0).flatten() > 0).to(x.dtype)
            decay = 1 - step * z_square.flatten()
            share = is_warmup.to(x.dtype)
        z = ScaleByPast.apply(x, scale, counts, kept, share, self.running_product, decay, step)
        assert isinstance(z, Tensor)
        self.move_averages(count, running_square=square)
        return affine.apply(z, axis=2)


@knobs
class MovingAverageBatchNorm(SquareNorm):
    """x / sqrt(q + eps) * r * weight + bias, q the mean of x^2 over the last `memory` steps.

    Pools all samples and positions. The newest step in q is the present batch, or the group that is
    normalized if a site splits the batch. With Q the running average of each batch's mean of x^2,
    which evaluation uses,

        r = clip(sqrt(q + eps) / sqrt(Q + eps), 1 / r_max, r_max), without a gradient.

    With g the gradient of z = x / sqrt(q + eps), the gradient of x is (g - p z) / sqrt(q + eps),
    where p averages each step's mean of g z over the last `memory` steps. Until the share `warmup`
    of the training and `memory` steps have passed, q and p are those of the batch and r is 1.
    MABN, arXiv:2001.06838.

    The paper also centres the weights of the preceding convolution. The authors' code
    (megvii-model/MABN) moves Q by q and not by the batch's mean of x^2; it has r = 1 for 1000 steps
    in one place and 100 in another, whatever the length of the training.

    If the last group of a split is short, the backward pass does not replace its oldest row of
    averages, from `memory` steps ago.

    Args:
        memory: steps in the moving average.
        momentum: weight of the new value in Q.
        warmup: share of the training with the statistics of the batch.
    """

    memory: int
    r_max: float
    warmup: float
    num_training_steps: int = NUM_TRAINING_STEPS
    momentum: float = field()
    past_squares: Tensor = field(init=False)
    past_products: Tensor = field(init=False)

    def check_knobs(self) -> None:
        super().check_knobs()
        if self.memory < 1 or self.r_max < 1:
            raise UserError(
                f"memory={self.memory}, r_max={self.r_max}: both must be 1 or more; "
                "try norm.memory=16 norm.r_max=5"
            )
        (self.warmup_steps,) = shares_to_steps(self.num_training_steps, warmup=self.warmup)

    def add_state(self) -> None:
        super().add_state()
        for name in ("past_squares", "past_products"):
            self.register_buffer(name, torch.zeros(self.memory, self.num_features))

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        with torch.no_grad():
            square, count = measure_mean(x.square(), real, group_dims(x))
            counts = torch.zeros_like(square[:, :, :1]) + count
            num_steps = before_step(self.num_batches_tracked, torch.int64)
            is_warmup = num_steps < max(self.memory, self.warmup_steps)
            rows = torch.arange(self.memory, device=x.device)
            newest = (rows == num_steps % self.memory)[:, None]  # (memory, 1), the row to replace
            share = 1 / torch.where(is_warmup, 1, self.memory).to(x.dtype)  # of the batch in q
            past_squares = before_step(self.past_squares, x.dtype)
            squares = over_channels(self._kept(past_squares, newest, is_warmup), x, axis=2)
            products = self._kept(self.past_products.to(x.dtype), newest, is_warmup)
            kept = over_channels(products, x, axis=2)
            running = over_channels(before_step(self.running_square, x.dtype), x, axis=2)
            scale = torch.rsqrt(squares + share * square + self.eps)
            r = torch.rsqrt(running + self.eps) / scale  # (G, 1, C, 1, ...)
            r = torch.where(is_warmup, 1, r.clamp(1 / self.r_max, self.r_max))
            step = newest.to(x.dtype)
        z = ScaleByPast.apply(x, scale, counts, kept, share, self.past_products, 1 - step, step)
        assert isinstance(z, Tensor)
        self.move_averages(count, running_square=square)
        with torch.no_grad():
            pooled, _ = pool_mean(square, count, dim=0)
            self.past_squares.copy_(torch.where(newest, pooled.flatten(), self.past_squares))
        return affine.apply(z, r, axis=2)

    def _kept(self, past: Tensor, newest: Tensor, is_warmup: Tensor) -> Tensor:
        """Returns the share of all rows but the newest in the mean of past (memory, C).

        In the warm-up it is zero.
        """
        others = torch.where(newest, 0, past).sum(dim=0) / self.memory
        return torch.where(is_warmup, 0, others)
