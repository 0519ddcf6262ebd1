"""Power normalization: batch norm's scale alone, by running averages, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.norms.moments import Moments
from normexp.norms.squares import ScaleByPast, SquareNorm
from normexp.norms.variant import Factors, as_before, measure_means, pool_means


class PowerNorm(SquareNorm):
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

    running_product: Tensor
    averages = ("running_square", "running_product")

    def __init__(
        self,
        num_features: int,
        *,
        warmup: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, name="power norm", eps=eps, momentum=momentum, affine=affine)
        self.warmup = warmup
        self.register_buffer("running_product", torch.zeros(num_features))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, warmup={self.warmup}"

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        with torch.no_grad():
            square, count = measure_means(x.square(), mask)
            warm = as_before(self.num_batches_tracked, torch.int64) < self.warmup
            old = as_before(self.running_square, x.dtype)
            scale = torch.rsqrt(torch.where(warm, square, old) + self.eps)  # (G, C)
            counts = x.new_zeros(len(x), 1) + count
            kept = torch.where(warm, 0, self.running_product.to(x.dtype))
            share = warm.to(x.dtype)
            squares = pool_means(Moments(square, scale.square() * square, counts)).var
            step = self.momentum * (counts.sum(dim=0) > 0).to(x.dtype)
            decay = 1 - step * squares  # squares (C,): the mean of z^2
        past = self.running_product
        z = ScaleByPast.apply(x, scale, counts, kept, share, past, decay, step)
        assert isinstance(z, Tensor)
        return Factors(z, None), Moments(square, square, count)
