"""Forward and backward of every norm in conf/norm, against torch.nn or else a plain formula.

A norm that has neither is compared with torch's batch norm and not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace

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
EPS, NUM_GROUPS = 1e-5, 8


class Formula(nn.Module):
    """A formula of x (N, C, *) with a weight and a bias per channel, a scalar and a shift."""

    def __init__(self, compute: Callable[[Formula, Tensor], Tensor], shape: Shape) -> None:
        super().__init__()
        per_channel = (shape[1], *[1] * (len(shape) - 2))
        self.compute = compute
        self.positions = tuple(range(2, len(shape)))
        self.weight = nn.Parameter(torch.ones(per_channel))
        self.bias = nn.Parameter(torch.zeros(per_channel))
        self.scalar, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def affine(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def layer(f: Formula, x: Tensor, eps: float = EPS, unbiased: bool = False) -> Tensor:
    dims = tuple(range(1, x.ndim))
    var = x.var(dims, unbiased=unbiased, keepdim=True)
    return f.affine((x - x.mean(dims, keepdim=True)) * torch.rsqrt(var + eps))


def mean_square(x: Tensor, dims: Shape) -> Tensor:
    return x.square().mean(dims, keepdim=True) + EPS


def over_channels(norm: Callable, x: Tensor, *parameters: Tensor) -> Tensor:
    """torch's norm of the last axis, on axis 1."""
    flat = [parameter.flatten() for parameter in parameters]
    return norm(x.movedim(1, -1), x.shape[1:2], *flat, eps=EPS).movedim(-1, 1)


FORMULAS: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "layer2d": lambda f, x: over_channels(F.layer_norm, x, f.weight, f.bias),
    "position": lambda _, x: over_channels(F.layer_norm, x),
    "rms": lambda f, x: over_channels(F.rms_norm, x, f.weight),
    "frn": lambda f, x: f.affine(x * torch.rsqrt(mean_square(x, f.positions))),
    "ln_no_eps": partial(layer, eps=0.0),
    "ln_unbiased": partial(layer, unbiased=True),
    "simple_rms": lambda _, x: x * torch.rsqrt(mean_square(x, (1,))),
    "scale": lambda f, x: f.scalar * x * torch.rsqrt(x.square().sum(1, keepdim=True) + EPS),
    "dyt": lambda f, x: f.affine(torch.tanh(f.scalar * x)),
    "derf": lambda f, x: f.affine(torch.erf(f.scalar * x + f.shift)),
}


def torch_norm(kind: str, shape: Shape, **options: bool) -> nn.Module:
    return getattr(nn, f"{kind}{len(shape) - 2}d")(shape[1], **options)


def per_position(shape: Shape) -> nn.Module:
    size = torch.Size(shape[1:])
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size.numel()), nn.Unflatten(1, size))


BATCH = ("torch.nn.BatchNorm", partial(torch_norm, "BatchNorm"))
INSTANCE = ("torch.nn.InstanceNorm", partial(torch_norm, "InstanceNorm", affine=True))
GROUP = ("torch.nn.GroupNorm", lambda shape: nn.GroupNorm(NUM_GROUPS, shape[1]))
ONE_GROUP = ("torch.nn.GroupNorm(1)", lambda shape: nn.GroupNorm(1, shape[1]))
PER_POSITION = ("torch.nn.BatchNorm1d of C * T", per_position)
IDENTITY = ("torch.nn.Identity", lambda _: nn.Identity())
TORCH = {
    "layer2d": "torch.nn.LayerNorm",
    "position": "torch.nn.LayerNorm",
    "rms": "torch.nn.RMSNorm",
}
COUNTERPARTS: dict[str, tuple[str, Callable[[Shape], nn.Module]]] = {
    **dict.fromkeys(("batch", "sync", "eval_norm"), BATCH),  # in training, in one process
    **dict.fromkeys(("instance", "ln_hw", "ln_time"), INSTANCE),
    **dict.fromkeys(("batch_per_position", "bn_per_position"), PER_POSITION),
    **dict.fromkeys(("group", "group_ws"), GROUP),
    **dict.fromkeys(("group1", "layer"), ONE_GROUP),
    **dict.fromkeys(("none", "nf", "skipinit", "ws"), IDENTITY),
    "frozen": ("torch.nn.BatchNorm in evaluation", lambda shape: BATCH[1](shape).eval()),
    **{
        name: (TORCH.get(name, "plain formula"), partial(Formula, f))
        for name, f in FORMULAS.items()
    },
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
    for choice, shape in product(choices(), SHAPES):
        name = choice.rpartition("/")[2]
        against, make = COUNTERPARTS.get(name, BATCH)
        aim = AIM if name in COUNTERPARTS else None
        try:
            candidates = {"ours": make_norm(choice, shape), "theirs": make(shape)}
            times = time_norms(bench, candidates, shape)
        except Exception as error:  # such as a norm of sequences only
            note = str(error).splitlines()[0]
            yield Row(f"norm {name} {shape}", against, None, aim, note=note)
            continue
        note = milliseconds(times, "ours", "theirs")
        what, found = f"norm {name} {shape}", ratio(times, "ours", "theirs")
        yield Row(what, against, found, aim, note=note)


def time_norms(
    bench: Bench, candidates: dict[str, nn.Module], shape: Shape
) -> dict[str, list[float]]:
    """Seconds of a forward and backward of each, on the same tensors at several places."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(PLACES):
        x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
        steps = {name: backward_of(norm, x, gradient) for name, norm in candidates.items()}
        repeats = round((0.02 if bench.quick else 0.05) / timed(steps["theirs"])())
        arms = {name: timed(step, max(1, repeats)) for name, step in steps.items()}
        for name, seconds in alternate(arms, bench.rounds(15) // PLACES).items():
            times[name] += seconds
    return times


def gpu_norms(bench: Bench) -> Iterator[Row]:
    """The least traffic of a forward and backward, five passes over x, as a share of a copy's."""
    shapes = [(8 * n, *rest) for n, *rest in SHAPES] if torch.cuda.is_available() else []
    for choice, shape in product(choices(), shapes):
        what = f"norm {choice.rpartition('/')[2]} {shape}"
        x = torch.randn(shape, device="cuda", requires_grad=True)
        gradient, target = torch.randn_like(x), torch.empty_like(x)
        try:
            step = backward_of(make_norm(choice, shape).cuda(), x, gradient)
        except Exception as error:  # such as a norm of sequences only
            yield Row(what, "copy bandwidth", None, note=str(error).splitlines()[0])
            continue
        arms = {"norm": timed_on_gpu(step), "copy": timed_on_gpu(partial(target.copy_, gradient))}
        times = alternate(arms, bench.rounds(9))
        # Forward reads x, writes y; backward reads x and dy, writes dx; a copy has two passes.
        yield Row(what, "copy bandwidth", 2.5 * ratio(times, "copy", "norm"))


def backward_of(norm: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    """A forward and backward of the norm, tried once."""

    def run() -> None:
        x.grad = None
        norm(x).backward(gradient)

    run()
    return run


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
