"""Power norm and moving average batch norm as one writes them: past their warm-up, in autograd.

Their backward passes keep averages over steps of their own, so each is an autograd function.
"""

from __future__ import annotations

from typing import Any

import torch
from bench_formulas import EPS, Formula
from torch import Tensor

POWER_MOMENTUM, AVERAGE_MOMENTUM = 0.1, 0.02
MEMORY, R_MAX = 16, 5.0


class Power(torch.autograd.Function):
    """arXiv:2003.07845, algorithm 2; f.var is the mean of squares, f.mean the one of g z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Formula) -> Tensor:
        scale = torch.rsqrt(f.var + EPS)
        z = x * scale
        f.var.lerp_(x.square().mean(f.samples, keepdim=True)[0], POWER_MOMENTUM)
        ctx.save_for_backward(z, scale)
        ctx.f = f
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (g,), (z, scale), f = grads, ctx.saved_tensors, ctx.f
        grad = (g - f.mean * z) * scale
        product = (g * z).mean(f.samples, keepdim=True)[0]
        square = z.square().mean(f.samples, keepdim=True)[0]
        f.mean.add_(POWER_MOMENTUM * (product - f.mean * square))
        return grad, None


class MovingAverage(torch.autograd.Function):
    """arXiv:2001.06838 with simple averages over the last MEMORY steps, kept as rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: AverageFormula) -> Tensor:
        square = x.square().mean(f.samples, keepdim=True)[0]
        f.squares[f.step % MEMORY] = square
        scale = torch.rsqrt(f.squares.mean(0) + EPS)
        z = x * scale
        r = (torch.rsqrt(f.var + EPS) / scale).clamp(1 / R_MAX, R_MAX)
        f.var.lerp_(square, AVERAGE_MOMENTUM)
        ctx.save_for_backward(z, scale, r)
        ctx.f = f
        return z * r

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        z, scale, r = ctx.saved_tensors
        f, g = ctx.f, grads[0] * r
        f.products[f.step % MEMORY] = (g * z).mean(f.samples, keepdim=True)[0]
        f.step += 1
        return (g - f.products.mean(0) * z) * scale, None


class AverageFormula(Formula):
    """A formula with rows for the last steps."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape, moving_average)
        self.step = 0
        self.squares = torch.ones(MEMORY, *self.mean.shape)
        self.products = torch.zeros(MEMORY, *self.mean.shape)


def power(f: Formula, x: Tensor) -> Tensor:
    z = Power.apply(x, f)
    assert isinstance(z, Tensor)
    return f.affine(z)


def moving_average(f: Formula, x: Tensor) -> Tensor:
    z = MovingAverage.apply(x, f)
    assert isinstance(z, Tensor)
    return f.affine(z)
