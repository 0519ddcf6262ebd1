"""Forward and backward of every norm in conf/norm, against its counterpart in torch.nn.

A norm that has none is compared with torch's batch norm and not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
from bench_measure import REPOSITORY, Bench, Row, alternate, milliseconds, ratio, timed
from torch import Tensor, nn

from normexp.batching.sizes import Sizes
from normexp.build import build_norm
from normexp.config.compose import compose_config
from normexp.config.spec import norm_of

Shape = tuple[int, ...]

SHAPES = ((128, 64, 16, 16), (64, 128, 256))
AIM = 1.10
PLACES = 3  # in memory: on tensors that lie unluckily a kernel takes up to twice as long


class OverChannels(nn.Module):
    """torch's norm of the last axis, on axis 1."""

    def __init__(self, make: Callable[[int], nn.Module], shape: Shape) -> None:
        super().__init__()
        self.norm = make(shape[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def torch_norm(kind: str, shape: Shape, **options: bool) -> nn.Module:
    return getattr(nn, f"{kind}{len(shape) - 2}d")(shape[1], **options)


def per_position(shape: Shape) -> nn.Module:
    size = torch.Size(shape[1:])
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size.numel()), nn.Unflatten(1, size))


WITHOUT_AFFINE = partial(nn.LayerNorm, elementwise_affine=False)
# norm= to what it computes too; in training, in one process
COUNTERPARTS: dict[str, tuple[str, Callable[[Shape], nn.Module]]] = {
    "batch sync eval_norm": ("BatchNorm", partial(torch_norm, "BatchNorm")),
    "frozen": ("BatchNorm in evaluation", lambda shape: torch_norm("BatchNorm", shape).eval()),
    "instance ln_hw ln_time": ("InstanceNorm", partial(torch_norm, "InstanceNorm", affine=True)),
    "batch_per_position bn_per_position": ("BatchNorm1d of C * T", per_position),
    "group group_ws": ("GroupNorm(8)", lambda shape: nn.GroupNorm(8, shape[1])),
    "group1 layer": ("GroupNorm(1)", lambda shape: nn.GroupNorm(1, shape[1])),
    "layer2d": ("LayerNorm", partial(OverChannels, nn.LayerNorm)),
    "position": ("LayerNorm", partial(OverChannels, WITHOUT_AFFINE)),
    "rms": ("RMSNorm", partial(OverChannels, partial(nn.RMSNorm, eps=1e-5))),
    "none nf skipinit ws": ("Identity", lambda _: nn.Identity()),
}
BY_NORM = {name: found for names, found in COUNTERPARTS.items() for name in names.split()}


def choices() -> list[str]:
    """What norm= takes, by the files of conf/norm."""
    folder = REPOSITORY / "conf" / "norm"
    return [
        str(path.relative_to(folder).with_suffix("")) for path in sorted(folder.rglob("*.yaml"))
    ]


def make_norm(choice: str, shape: Shape) -> nn.Module:
    """The norm of conf/norm/<choice>.yaml for inputs of `shape`, in training mode."""
    data = SimpleNamespace(input_shape=shape[-1:])  # for norms that keep state per position
    norm = norm_of(compose_config([f"norm={choice}"]))
    factory = build_norm(norm, Sizes(shape[0]), data)  # type: ignore[arg-type]
    return factory.make(shape[1]).train()


def norms(bench: Bench) -> Iterator[Row]:
    for choice, shape in product(choices(), SHAPES):
        name = choice.rpartition("/")[2]
        against, make = BY_NORM.get(name, BY_NORM["batch"])
        aim = AIM if name in BY_NORM else None
        try:
            candidates = {"ours": make_norm(choice, shape), "theirs": make(shape)}
            times = time_norms(bench, candidates, shape)
        except Exception as error:  # such as a norm of sequences only
            note = str(error).splitlines()[0]
            yield Row(f"norm {name} {shape}", f"torch.nn.{against}", None, aim, note=note)
            continue
        note = milliseconds(times, "ours", "theirs")
        what, found = f"norm {name} {shape}", ratio(times, "ours", "theirs")
        yield Row(what, f"torch.nn.{against}", found, aim, note=note)


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


def backward_of(norm: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    """A forward and backward of the norm, tried once."""

    def run() -> None:
        x.grad = None
        norm(x).backward(gradient)

    run()
    return run


SECTIONS = {"norms": norms}
