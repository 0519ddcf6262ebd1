"""Moving average batch normalization, with averages in the forward and the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.moments import Moments
from normexp.norms.squares import ScaleByPast, SquareNorm
from normexp.norms.variant import Factors, as_before, measure_means, over_groups, pool_means


class MovingAverageBatchNorm(SquareNorm):
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

    past_squares: Tensor
    past_products: Tensor
    averages = ("running_square", "past_squares", "past_products")

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
        if memory < 1 or r_max < 1:
            raise UserError(
                f"memory={memory}, r_max={r_max}: neither may be below one; "
                "try norm.memory=16 norm.r_max=5"
            )
        name = "moving average batch norm"
        super().__init__(num_features, name=name, eps=eps, momentum=momentum, affine=affine)
        self.memory, self.r_max, self.warmup = memory, r_max, warmup
        self.register_buffer("past_squares", torch.zeros(memory, num_features))
        self.register_buffer("past_products", torch.zeros(memory, num_features))

    def extra_repr(self) -> str:
        knobs = f"memory={self.memory}, r_max={self.r_max}, warmup={self.warmup}"
        return f"{super().extra_repr()}, {knobs}"

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        with torch.no_grad():
            square, count = measure_means(x.square(), mask)
            counts = x.new_zeros(len(x), 1) + count
            steps = as_before(self.num_batches_tracked, torch.int64)
            warm = steps < max(self.memory, self.warmup)
            newest = self._is_newest(steps)
            share = 1 / torch.where(warm, 1, self.memory).to(x.dtype)  # of the batch's own mean
            squares = self._keep(as_before(self.past_squares, x.dtype), newest, warm)
            products = self._keep(self.past_products.to(x.dtype), newest, warm)
            running = as_before(self.running_square, x.dtype)
            scale = torch.rsqrt(squares + share * square + self.eps)  # (G, C)
            r = torch.rsqrt(running + self.eps) / scale
            r = torch.where(warm, 1, r.clamp(1 / self.r_max, self.r_max))
            step = newest.to(x.dtype)
        past = self.past_products
        z = ScaleByPast.apply(x, scale, counts, products, share, past, 1 - step, step)
        assert isinstance(z, Tensor)
        return Factors(z, over_groups(r, x)), Moments(square, square, count)

    def _keep(self, past: Tensor, newest: Tensor, warm: Tensor) -> Tensor:
        """What rows of past (memory, C) other than the newest add to their mean (C,); 0 if warm."""
        return torch.where(warm, 0, torch.where(newest, 0, past).sum(dim=0) / self.memory)

    def _is_newest(self, step: Tensor) -> Tensor:
        """Where step `step`, counted from 0, is among the last: (memory, 1), true at one place."""
        places = torch.arange(self.memory, device=step.device)
        return (places == step % self.memory)[:, None]

    @torch.no_grad()
    def advance(self, moments: Moments) -> None:
        square = pool_means(moments).var
        newest = self._is_newest(self.num_batches_tracked)
        self.past_squares.copy_(torch.where(newest, square, self.past_squares))
        super().advance(moments)
