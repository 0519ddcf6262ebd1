"""Forward and backward of every norm in conf/norm, against torch.nn or else the plain formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from bench_counterparts import COUNTERPARTS
from bench_measure import Bench, Row, alternate, milliseconds, ratio, timed
from torch import Tensor, nn

from normexp.batching.sizes import Sizes
from normexp.build import build_norm
from normexp.config.compose import compose_config
from normexp.config.help import group_choices

SHAPES = ((128, 64, 16, 16), (64, 128, 256))
AIM = 1.10
PLACES = 3  # in memory: on tensors that lie unluckily a kernel takes up to twice as long


def norms(bench: Bench) -> Iterator[Row]:
    for name in group_choices("norm"):
        if name != "custom":
            for shape in SHAPES:
                yield _row(bench, name, shape)


def _row(bench: Bench, name: str, shape: tuple[int, ...]) -> Row:
    what = f"norm {name} {shape}"
    if name not in COUNTERPARTS:
        return Row(what, "-", None, AIM, note="no counterpart in scripts/bench_counterparts.py")
    against, make = COUNTERPARTS[name]
    try:
        ours = make_norm(name, shape)
        ours(torch.randn(2, *shape[1:]))
    except Exception as error:  # a norm of sequences alone, say: its own words
        return Row(what, against, None, AIM, note=str(error).splitlines()[0])
    norms = {"ours": ours, "theirs": make(shape)}
    times: dict[str, list[float]] = {name: [] for name in norms}
    for _ in range(PLACES):
        x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
        arms = {name: _arm(bench, norm, x, gradient) for name, norm in norms.items()}
        for name, own in alternate(arms, bench.rounds(15) // PLACES).items():
            times[name] += own
    note = f"{milliseconds(times, 'ours')}, {milliseconds(times, 'theirs')}"
    return Row(what, against, ratio(times, "ours", "theirs"), AIM, note=note)


def make_norm(name: str, shape: tuple[int, ...]) -> nn.Module:
    """The norm of conf/norm/<name>.yaml for inputs of `shape`, in training mode."""
    data = SimpleNamespace(input_shape=shape[-1:])  # for norms that keep state per position
    factory = build_norm(compose_config([f"norm={name}"]), Sizes(shape[0]), data)  # type: ignore[arg-type]
    return factory.make(shape[1]).train()


def _arm(
    bench: Bench, norm: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor
) -> Callable[[], float]:
    def once() -> None:
        x.grad = None
        norm(x).backward(gradient)

    once()
    seconds = 0.02 if bench.quick else 0.05  # many calls where one is short
    return timed(once, max(1, round(seconds / timed(once)())))


MEASUREMENTS = {"norms": norms}
