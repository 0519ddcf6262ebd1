"""Forward and backward of every norm in conf/norm, against torch.nn or else the plain formula.

A formula does the work of its norm as one writes it, in autograd, the running averages included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bench_measure import REPOSITORY, Bench, Row, alternate, milliseconds, ratio, timed
from torch import Tensor, nn

from normexp.batching.sizes import Sizes
from normexp.build import build_norm
from normexp.config.compose import compose_config

Shape = tuple[int, ...]

SHAPES = ((128, 64, 16, 16), (64, 128, 256))
AIM = 1.10
PLACES = 3  # in memory: on tensors that lie unluckily a kernel takes up to twice as long
EPS, MOMENTUM, NUM_GROUPS = 1e-5, 0.1, 8


class Formula(nn.Module):
    """A formula of x (N, C, *) with a weight and a bias per channel, and running averages."""

    mean: Tensor
    var: Tensor

    def __init__(self, compute: Callable[[Formula, Tensor], Tensor], shape: Shape) -> None:
        super().__init__()
        per_channel = (shape[1], *[1] * (len(shape) - 2))
        self.compute = compute
        self.positions = tuple(range(2, len(shape)))
        self.samples = (0, *self.positions)
        self.weight = nn.Parameter(torch.ones(per_channel))
        self.bias = nn.Parameter(torch.zeros(per_channel))
        self.v = nn.Parameter(torch.ones(per_channel))
        self.scalar, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.0))
        self.mix, self.mix2 = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(per_channel))
        self.register_buffer("var", torch.ones(per_channel))
        self.rows = torch.ones(2, 16, *per_channel)  # the last steps of moving average batch norm
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def affine(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias

    @torch.no_grad()
    def advance(self, mean: Tensor, var: Tensor) -> None:
        self.mean.mul_(1 - MOMENTUM).add_(MOMENTUM * mean[0])
        self.var.mul_(1 - MOMENTUM).add_(MOMENTUM * var[0])


def moments(x: Tensor, dims: Shape, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    return x.mean(dims, keepdim=True), x.var(dims, unbiased=unbiased, keepdim=True)


def rsqrt(var: Tensor) -> Tensor:
    return torch.rsqrt(var + EPS)


def batch(f: Formula, x: Tensor, scale: Callable = rsqrt, unbiased: bool = False) -> Tensor:
    mean, var = moments(x, f.samples, unbiased)
    f.advance(mean, var)
    return f.affine((x - mean) * scale(var))


def layer(f: Formula, x: Tensor, scale: Callable = rsqrt, unbiased: bool = False) -> Tensor:
    mean, var = moments(x, tuple(range(1, x.ndim)), unbiased)
    return f.affine((x - mean) * scale(var))


def naive_variance(f: Formula, x: Tensor) -> Tensor:
    mean = x.mean(f.samples, keepdim=True)
    var = x.square().mean(f.samples, keepdim=True) - mean.square()
    f.advance(mean, var)
    return f.affine((x - mean) * rsqrt(var))


def l1_batch(f: Formula, x: Tensor) -> Tensor:
    mean = x.mean(f.samples, keepdim=True)
    deviation = 1.2533 * (x - mean).abs().mean(f.samples, keepdim=True)
    f.advance(mean, deviation)
    return f.affine((x - mean) / (deviation + EPS))


def batch_renorm(f: Formula, x: Tensor) -> Tensor:
    mean, var = moments(x, f.samples)
    sigma, running = (var + EPS).sqrt(), (f.var + EPS).sqrt()
    r = (sigma / running).detach().clamp(1 / 3, 3)
    d = ((mean - f.mean) / running).detach().clamp(-5, 5)
    f.advance(mean, var)
    return f.affine((x - mean) / sigma * r + d)


def switchable(f: Formula, x: Tensor) -> Tensor:
    own_mean, own_var = moments(x, f.positions)
    own_square = own_var + own_mean.square()
    means = [own_mean, own_mean.mean(1, keepdim=True), own_mean.mean(0, keepdim=True)]
    squares = [own_square, own_square.mean(1, keepdim=True), own_square.mean(0, keepdim=True)]
    variances = [square - mean.square() for square, mean in zip(squares, means, strict=True)]
    f.advance(means[2], variances[2])
    mean = sum(a * m for a, m in zip(f.mix.softmax(0), means, strict=True))
    var = sum(a * v for a, v in zip(f.mix2.softmax(0), variances, strict=True))
    return f.affine((x - mean) * rsqrt(var))


def batch_instance(f: Formula, x: Tensor) -> Tensor:
    mean, var = moments(x, f.samples)
    own_mean, own_var = moments(x, f.positions)
    f.advance(mean, var)
    gate = f.scalar.clamp(0, 1)
    of_batch, of_sample = (x - mean) * rsqrt(var), (x - own_mean) * rsqrt(own_var)
    return f.affine(gate * of_batch + (1 - gate) * of_sample)


def evonorm_b0(f: Formula, x: Tensor) -> Tensor:
    mean, var = moments(x, f.samples)
    f.advance(mean, var)
    own = x.var(f.positions, unbiased=False, keepdim=True)
    return f.affine(x / torch.maximum((var + EPS).sqrt(), f.v * x + (own + EPS).sqrt()))


def evonorm_s0(f: Formula, x: Tensor) -> Tensor:
    groups = x.unflatten(1, (NUM_GROUPS, -1))
    own = groups.var(tuple(range(2, groups.ndim)), unbiased=False, keepdim=True)
    gated = (x * torch.sigmoid(f.v * x)).unflatten(1, (NUM_GROUPS, -1))
    return f.affine((gated * rsqrt(own)).flatten(1, 2))


def crms(f: Formula, x: Tensor) -> Tensor:
    total = x.square().sum(1, keepdim=True) + x.sum(1, keepdim=True).square()
    return x * rsqrt(total / (x.shape[1] + 1)) * f.weight


def ghost(f: Formula, x: Tensor) -> Tensor:
    state = [tensor.flatten() for tensor in (f.mean, f.var, f.weight, f.bias)]
    return torch.cat([F.batch_norm(part, *state, training=True) for part in x.split(16)])


def causal(f: Formula, x: Tensor, num_groups: int) -> Tensor:
    groups = x.unflatten(1, (num_groups, -1))
    count = torch.arange(1, x.shape[2] + 1) * groups.shape[2]
    mean = groups.sum(2, keepdim=True).cumsum(-1) / count
    var = groups.square().sum(2, keepdim=True).cumsum(-1) / count - mean.square()
    return f.affine(((groups - mean) * rsqrt(var)).flatten(1, 2))


class Power(torch.autograd.Function):
    """arXiv:2003.07845, algorithm 2; f.var is the mean of squares, f.mean the one of g z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Formula) -> Tensor:
        scale = rsqrt(f.var)
        z = x * scale
        f.var.lerp_(x.square().mean(f.samples, keepdim=True)[0], 0.1)
        ctx.save_for_backward(z, scale)
        ctx.f = f
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (g,), (z, scale), f = grads, ctx.saved_tensors, ctx.f
        grad = (g - f.mean * z) * scale
        product = (g * z).mean(f.samples, keepdim=True)[0]
        square = z.square().mean(f.samples, keepdim=True)[0]
        f.mean.add_(0.1 * (product - f.mean * square))
        return grad, None


class MovingAverage(torch.autograd.Function):
    """arXiv:2001.06838 with simple averages over the last 16 steps, kept as rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Formula) -> Tensor:
        square = x.square().mean(f.samples, keepdim=True)[0]
        f.rows[0, f.step % 16] = square
        scale = rsqrt(f.rows[0].mean(0))
        z = x * scale
        r = (rsqrt(f.var) / scale).clamp(1 / 5, 5)
        f.var.lerp_(square, 0.02)
        ctx.save_for_backward(z, scale, r)
        ctx.f = f
        return z * r

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (z, scale, r), f = ctx.saved_tensors, ctx.f
        g = grads[0] * r
        f.rows[1, f.step % 16] = (g * z).mean(f.samples, keepdim=True)[0]
        f.step += 1
        return (g - f.rows[1].mean(0) * z) * scale, None


FORMULAS: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "bn_biased_ema": batch,
    "bn_eps_outside": partial(batch, scale=lambda var: 1 / (var.sqrt() + EPS)),
    "bn_naive_var": naive_variance,
    "bn_unbiased": partial(batch, unbiased=True),
    "no_eps": partial(batch, scale=torch.rsqrt),
    "l1_batch": l1_batch,
    "batch_renorm": batch_renorm,
    "switchable": switchable,
    "batch_instance": batch_instance,
    "evonorm_b0": evonorm_b0,
    "evonorm_s0": evonorm_s0,
    "frn": lambda f, x: f.affine(x * rsqrt(x.square().mean(f.positions, keepdim=True))),
    "ln_no_eps": partial(layer, scale=torch.rsqrt),
    "ln_unbiased": partial(layer, unbiased=True),
    "simple_rms": lambda _, x: x * rsqrt(x.square().mean(1, keepdim=True)),
    "scale": lambda f, x: f.scalar * x * rsqrt(x.square().sum(1, keepdim=True)),
    "crms": crms,
    "dyt": lambda f, x: f.affine(torch.tanh(f.scalar * x)),
    "derf": lambda f, x: f.affine(torch.erf(f.scalar * x + f.shift)),
    "power": lambda f, x: f.affine(Power.apply(x, f)),  # type: ignore[arg-type]
    "moving_average_batch": lambda f, x: f.affine(MovingAverage.apply(x, f)),  # type: ignore[arg-type]
    "ghost": ghost,
    "causal_group": partial(causal, num_groups=NUM_GROUPS),
    "causal_instance": lambda f, x: causal(f, x, x.shape[1]),
}


class Wrapped(nn.Module):
    """torch's norm on another layout of x: `into` before it, `back` after it."""

    def __init__(self, norm: nn.Module, into: Callable, back: Callable) -> None:
        super().__init__()
        self.norm, self.into, self.back = norm, into, back

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.norm(self.into(x)), x)


def torch_batch(shape: Shape) -> nn.Module:
    return (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1])


def torch_instance(shape: Shape) -> nn.Module:
    return (nn.InstanceNorm2d if len(shape) == 4 else nn.InstanceNorm1d)(shape[1], affine=True)


def per_position(shape: Shape) -> nn.Module:
    norm = nn.BatchNorm1d(torch.Size(shape[1:]).numel())
    return Wrapped(norm, lambda x: x.flatten(1), lambda y, x: y.view_as(x))


def last_axis(make: Callable[..., nn.Module], shape: Shape) -> nn.Module:
    norm = make(shape[1], eps=EPS)
    return Wrapped(norm, lambda x: x.movedim(1, -1), lambda y, _: y.movedim(-1, 1))


def group(num_groups: int, shape: Shape) -> nn.Module:
    return nn.GroupNorm(num_groups, shape[1])


BATCH = ("torch.nn.BatchNorm", torch_batch)
INSTANCE = ("torch.nn.InstanceNorm", torch_instance)
PER_POSITION = ("torch.nn.BatchNorm1d of C * T", per_position)
GROUP = ("torch.nn.GroupNorm", partial(group, NUM_GROUPS))
IDENTITY = ("torch.nn.Identity", lambda _: nn.Identity())
PLAIN_LAYER_NORM = partial(nn.LayerNorm, elementwise_affine=False)
COUNTERPARTS: dict[str, tuple[str, Callable[[Shape], nn.Module]]] = {
    **dict.fromkeys(("batch", "sync", "eval_norm"), BATCH),  # in training, in one process
    **dict.fromkeys(("instance", "ln_hw", "ln_time"), INSTANCE),
    **dict.fromkeys(("batch_per_position", "bn_per_position"), PER_POSITION),
    **dict.fromkeys(("group", "group_ws"), GROUP),
    **dict.fromkeys(("none", "nf", "skipinit", "ws"), IDENTITY),
    "frozen": ("torch.nn.BatchNorm in evaluation", lambda shape: torch_batch(shape).eval()),
    "group1": ("torch.nn.GroupNorm", partial(group, 1)),
    "layer": ("torch.nn.GroupNorm(1)", partial(group, 1)),
    "layer2d": ("torch.nn.LayerNorm", partial(last_axis, nn.LayerNorm)),
    "position": ("torch.nn.LayerNorm", partial(last_axis, PLAIN_LAYER_NORM)),
    "rms": ("torch.nn.RMSNorm", partial(last_axis, nn.RMSNorm)),
    **{name: ("plain formula", partial(Formula, compute)) for name, compute in FORMULAS.items()},
}


def choices() -> list[str]:
    """What norm= takes, by the files of conf/norm."""
    folder = REPOSITORY / "conf" / "norm"
    return [
        str(path.relative_to(folder).with_suffix("")) for path in sorted(folder.rglob("*.yaml"))
    ]


def make_norm(choice: str, shape: Shape) -> nn.Module:
    """The norm of conf/norm/<choice>.yaml for inputs of `shape`, in training mode."""
    data = SimpleNamespace(input_shape=shape[-1:])  # for norms that keep state per position
    factory = build_norm(compose_config([f"norm={choice}"]), Sizes(shape[0]), data)  # type: ignore[arg-type]
    return factory.make(shape[1]).train()


def norms(bench: Bench) -> Iterator[Row]:
    for choice in choices():
        for shape in SHAPES:
            yield norm_row(bench, choice, shape)


def norm_row(bench: Bench, choice: str, shape: Shape) -> Row:
    name = choice.rpartition("/")[2]
    what = f"norm {name} {shape}"
    if name not in COUNTERPARTS:
        return Row(what, "-", None, AIM, note="no counterpart in scripts/bench_norms.py")
    against, make = COUNTERPARTS[name]
    try:
        norm = make_norm(choice, shape)
        norm(torch.randn(2, *shape[1:]))
    except Exception as error:  # such as a norm of sequences only
        return Row(what, against, None, AIM, note=str(error).splitlines()[0])
    candidates = {"ours": norm, "theirs": make(shape)}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(PLACES):
        x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
        arms = {name: timed_backward(bench, norm, x, gradient) for name, norm in candidates.items()}
        for name, seconds in alternate(arms, bench.rounds(15) // PLACES).items():
            times[name] += seconds
    note = milliseconds(times, "ours", "theirs")
    return Row(what, against, ratio(times, "ours", "theirs"), AIM, note=note)


def timed_backward(
    bench: Bench, norm: nn.Module, x: Tensor, gradient: Tensor
) -> Callable[[], float]:
    """An arm: a forward and backward, repeated where one is short."""
    once = partial(forward_backward, norm, x, gradient)
    once()
    return timed(once, max(1, round((0.02 if bench.quick else 0.05) / timed(once)())))


def forward_backward(norm: nn.Module, x: Tensor, gradient: Tensor) -> None:
    x.grad = None
    norm(x).backward(gradient)


def gpu_norms(bench: Bench) -> Iterator[Row]:
    """The least traffic of a forward and backward, five passes over x, as a share of a copy's."""
    if not torch.cuda.is_available():
        return
    for choice in choices():
        for shape in ((8 * n, *rest) for n, *rest in SHAPES):
            yield bandwidth_row(bench, choice, shape)


def bandwidth_row(bench: Bench, choice: str, shape: Shape) -> Row:
    what = f"norm {choice.rpartition('/')[2]} {shape}"
    x = torch.randn(shape, device="cuda", requires_grad=True)
    gradient, target = torch.randn_like(x), torch.empty_like(x)
    try:
        step = partial(forward_backward, make_norm(choice, shape).cuda(), x, gradient)
        step()
    except Exception as error:  # such as a norm of sequences only
        return Row(what, "copy bandwidth", None, note=str(error).splitlines()[0])
    arms = {"norm": timed_on_gpu(step), "copy": timed_on_gpu(lambda: target.copy_(gradient))}
    times = alternate(arms, bench.rounds(9))
    # Forward reads x and writes y; backward reads x and dy and writes dx; a copy has two passes.
    share = 2.5 * statistics.median(times["copy"]) / statistics.median(times["norm"])
    return Row(what, "copy bandwidth", share)


def timed_on_gpu(run: Callable[[], object], repeats: int = 20) -> Callable[[], float]:
    def all_of_them() -> None:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()

    def arm() -> float:
        torch.cuda.synchronize()
        return timed(all_of_them)() / repeats

    return arm


SECTIONS = {"norms": norms, "gpu-norms": gpu_norms}
