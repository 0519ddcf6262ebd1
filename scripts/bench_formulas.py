"""The formulas of norms as one writes them, in plain autograd, with what state the norm keeps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS, MOMENTUM = 1e-5, 0.1
Shape = tuple[int, ...]


class Formula(nn.Module):
    """A formula with a weight and a bias per channel, and running averages where it keeps any."""

    mean: Tensor
    var: Tensor

    def __init__(self, shape: Shape, compute: Callable[[Formula, Tensor], Tensor]) -> None:
        super().__init__()
        channels, ones = shape[1], (1,) * (len(shape) - 2)
        self.compute = compute
        self.samples = (0, *range(2, len(shape)))
        self.positions = tuple(range(2, len(shape)))
        self.weight = nn.Parameter(torch.ones(channels, *ones))
        self.bias = nn.Parameter(torch.zeros(channels, *ones))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor(0.0))
        self.v = nn.Parameter(torch.ones(channels, *ones))
        self.mix = nn.Parameter(torch.ones(3))
        self.mix2 = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(channels, *ones))
        self.register_buffer("var", torch.ones(channels, *ones))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def affine(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias

    def moments(self, x: Tensor, dims: tuple[int, ...], unbiased: bool = False):
        mean = x.mean(dims, keepdim=True)
        return mean, x.var(dims, unbiased=unbiased, keepdim=True)

    @torch.no_grad()
    def advance(self, mean: Tensor, var: Tensor) -> None:
        self.mean.mul_(1 - MOMENTUM).add_(MOMENTUM * mean[0])
        self.var.mul_(1 - MOMENTUM).add_(MOMENTUM * var[0])


def _batch(f: Formula, x: Tensor, scale: Callable[[Tensor], Tensor], unbiased: bool = False):
    mean, var = f.moments(x, f.samples, unbiased)
    f.advance(mean, var)
    return f.affine((x - mean) * scale(var))


def _rsqrt(var: Tensor) -> Tensor:
    return torch.rsqrt(var + EPS)


def biased_average(f: Formula, x: Tensor) -> Tensor:
    return _batch(f, x, _rsqrt)


def eps_outside(f: Formula, x: Tensor) -> Tensor:
    return _batch(f, x, lambda var: 1 / (var.sqrt() + EPS))


def no_eps(f: Formula, x: Tensor) -> Tensor:
    return _batch(f, x, torch.rsqrt)


def unbiased_batch(f: Formula, x: Tensor) -> Tensor:
    return _batch(f, x, _rsqrt, unbiased=True)


def naive_variance(f: Formula, x: Tensor) -> Tensor:
    mean = x.mean(f.samples, keepdim=True)
    var = x.square().mean(f.samples, keepdim=True) - mean.square()
    f.advance(mean, var)
    return f.affine((x - mean) * _rsqrt(var))


def l1_batch(f: Formula, x: Tensor) -> Tensor:
    mean = x.mean(f.samples, keepdim=True)
    deviation = 1.2533 * (x - mean).abs().mean(f.samples, keepdim=True)
    f.advance(mean, deviation)
    return f.affine((x - mean) / (deviation + EPS))


def renorm(f: Formula, x: Tensor) -> Tensor:
    mean, var = f.moments(x, f.samples)
    sigma, running = (var + EPS).sqrt(), (f.var + EPS).sqrt()
    r = (sigma / running).detach().clamp(1 / 3, 3)
    d = ((mean - f.mean) / running).detach().clamp(-5, 5)
    f.advance(mean, var)
    return f.affine((x - mean) / sigma * r + d)


def switchable(f: Formula, x: Tensor) -> Tensor:
    mean_i, var_i = f.moments(x, f.positions)
    square_i = var_i + mean_i.square()
    mean_l, square_l = mean_i.mean(1, keepdim=True), square_i.mean(1, keepdim=True)
    mean_b, square_b = mean_i.mean(0, keepdim=True), square_i.mean(0, keepdim=True)
    var_l, var_b = square_l - mean_l.square(), square_b - mean_b.square()
    f.advance(mean_b, var_b)
    a, b = f.mix.softmax(0), f.mix2.softmax(0)
    mean = a[0] * mean_i + a[1] * mean_l + a[2] * mean_b
    var = b[0] * var_i + b[1] * var_l + b[2] * var_b
    return f.affine((x - mean) * _rsqrt(var))


def batch_instance(f: Formula, x: Tensor) -> Tensor:
    mean, var = f.moments(x, f.samples)
    own_mean, own_var = f.moments(x, f.positions)
    f.advance(mean, var)
    gate = f.scalar.clamp(0, 1)
    of_batch, of_sample = (x - mean) * _rsqrt(var), (x - own_mean) * _rsqrt(own_var)
    return f.affine(gate * of_batch + (1 - gate) * of_sample)


def evonorm_b0(f: Formula, x: Tensor) -> Tensor:
    mean, var = f.moments(x, f.samples)
    f.advance(mean, var)
    own = x.var(f.positions, unbiased=False, keepdim=True)
    return f.affine(x / torch.maximum((var + EPS).sqrt(), f.v * x + (own + EPS).sqrt()))


def evonorm_s0(f: Formula, x: Tensor) -> Tensor:
    groups = x.unflatten(1, (8, -1))
    own = groups.var(tuple(range(2, groups.ndim)), unbiased=False, keepdim=True)
    scaled = (x * torch.sigmoid(f.v * x)).unflatten(1, (8, -1)) * _rsqrt(own)
    return f.affine(scaled.flatten(1, 2))


def frn(f: Formula, x: Tensor) -> Tensor:
    return f.affine(x * torch.rsqrt(x.square().mean(f.positions, keepdim=True) + EPS))


def _layer(f: Formula, x: Tensor, scale: Callable[[Tensor], Tensor], unbiased: bool = False):
    mean, var = f.moments(x, tuple(range(1, x.ndim)), unbiased)
    return f.affine((x - mean) * scale(var))


def layer_no_eps(f: Formula, x: Tensor) -> Tensor:
    return _layer(f, x, torch.rsqrt)


def layer_unbiased(f: Formula, x: Tensor) -> Tensor:
    return _layer(f, x, _rsqrt, unbiased=True)


def simple_rms(f: Formula, x: Tensor) -> Tensor:
    del f
    return x * _rsqrt(x.square().mean(1, keepdim=True))


def scale(f: Formula, x: Tensor) -> Tensor:
    return f.scalar * x * torch.rsqrt(x.square().sum(1, keepdim=True) + EPS)


def crms(f: Formula, x: Tensor) -> Tensor:
    total = x.square().sum(1, keepdim=True) + x.sum(1, keepdim=True).square()
    return x * _rsqrt(total / (x.shape[1] + 1)) * f.weight


def dyt(f: Formula, x: Tensor) -> Tensor:
    return f.affine(torch.tanh(f.scalar * x))


def derf(f: Formula, x: Tensor) -> Tensor:
    return f.affine(torch.erf(f.scalar * x + f.shift))


def ghost(f: Formula, x: Tensor) -> Tensor:
    state = [tensor.flatten() for tensor in (f.mean, f.var, f.weight, f.bias)]
    return torch.cat([F.batch_norm(part, *state, training=True) for part in x.split(16)])


def _cumulative(x: Tensor, num_groups: int) -> Tensor:
    groups = x.unflatten(1, (num_groups, -1))
    each = groups.shape[2]
    count = torch.arange(1, x.shape[2] + 1) * each
    mean = groups.sum(2, keepdim=True).cumsum(-1) / count
    var = groups.square().sum(2, keepdim=True).cumsum(-1) / count - mean.square()
    return ((groups - mean) * _rsqrt(var)).flatten(1, 2)


def causal_group(f: Formula, x: Tensor) -> Tensor:
    return f.affine(_cumulative(x, 8))


def causal_instance(f: Formula, x: Tensor) -> Tensor:
    return f.affine(_cumulative(x, x.shape[1]))
