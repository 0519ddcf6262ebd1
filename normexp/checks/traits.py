"""Traits of a norm: what its output depends on and ignores, and by how much."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normexp.checks.probe import Probe, moves
from normexp.checks.sites import EnteredSite, SiteOnMaps
from normexp.checks.subject import (
    Check,
    Line,
    Shape,
    Subject,
    Trait,
    accepts,
    every,
    largest,
    measured,
    show,
    skipped,
    values,
)
from normexp.norms.adapt import EPS_NAMES
from normexp.norms.parts import CONVOLUTIONS
from normexp.norms.site import Site, takes_mask

PADDED = (4, 5)  # samples and positions
REAL = (5, 3, 2, 4)  # positions of each sample that are real
SCALES = (4.0, 0.3)
SHIFTS = (3.0, -20.0)
TINY_EPS = 1e-12
SMALL_STD = 1e-3  # its variance, 1e-6, lies below the usual eps
BATCHES = (4, 32)
MANY = 33  # samples, or positions in a row
MAP = (4, 4)  # positions per sample where batches are compared
GAP_STEPS = 60  # training batches, after which 0.2 % is left of a start at momentum 0.1

# ---------------------------------------------------------------- dependences


def with_many_samples(subject: Subject) -> list[Shape]:
    many = (MANY, *subject.smallest[1:])
    return [*subject.shapes, *([many] if accepts(subject, many) else [])]


def with_positions(subject: Subject) -> list[Shape]:
    """Inputs with positions, also with many in a row."""
    own = subject.with_dims(3, 4, 5)
    long = [(*shape[:-1], MANY) for shape in own[:1]]
    return own + [shape for shape in long if accepts(subject, shape)]


def texts(subject: Subject) -> list[Shape]:
    return [shape for shape in with_positions(subject) if len(shape) == 3]


def padded_text(subject: Subject) -> list[Shape]:
    shape = (PADDED[0], subject.num_features, PADDED[1])
    return [shape] if shape in subject.shapes else []


def mixes_samples(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Do other samples move an output, a gradient or a running state?"""
    x = values(shape, torch.float64)
    stages = subject.stages(shape, training)
    return _first(stage.reads_samples(x, training=training) for stage in stages)


def pools_channels(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Do other channels move an output or a gradient?"""
    x = values(shape, torch.float64)
    stages = subject.stages(shape, training)
    return _first(stage.reads_across(x, 1, gradients=training) for stage in stages)


def pools_positions(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Do other positions move an output or a gradient?"""
    x = values(shape, torch.float64)
    stages = subject.stages(shape, training)
    moved = _first(stage.reads_across(x, 2, gradients=training) for stage in stages)
    # Later positions are other positions, so the two lines agree.
    return moved or (leaks_future(subject, shape, training) if len(shape) == 3 else None)


def leaks_future(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Do later positions of a text (N, C, T) move an earlier output?"""
    x, stages = values(shape, torch.float64), subject.stages(shape, training)
    return "output" if any(stage.reads_later(x, 2) is not None for stage in stages) else None


def _first(answers: Iterator[str | None]) -> str | None:
    return next((answer for answer in answers if answer is not None), None)


def reads_masked(subject: Subject, shape: Shape, training: bool) -> Line | str | None:
    """Does the content or amount of masked positions move real outputs or the state?"""
    norm = subject.trained(shape, torch.float32)
    if not takes_mask(norm):
        return skipped("its forward has no argument `mask`; it is given the real positions only")
    mask = torch.arange(PADDED[1]) < torch.tensor(REAL)[:, None]
    module = SiteOnMaps(Site(norm, "sequence", None), torch.Size(PADDED[1:]))
    site = EnteredSite(["norm"], module, torch.Size(shape), mask)
    return "output" if site.reads_padding(training=training) else None


def has_running_state(subject: Subject, shape: Shape) -> Line:
    """Does a training forward change buffers?"""
    probe = Probe(subject.norm(shape))
    before = dict(probe.module.named_buffers())
    after = probe.observe(1 + 2 * values(shape)).state
    changed = [n for n, b in after.items() if n not in before or not torch.equal(b, before[n])]
    return measured("yes", ", ".join(changed)) if changed else measured("no")


# ---------------------------------------------------------------- invariance

Change = Callable[[Tensor], Tensor]


def scaled_by_channel(x: Tensor) -> Tensor:
    factors = torch.linspace(0.5, SCALES[0], x.shape[1], dtype=x.dtype)
    return x * factors.view(-1, *[1] * (x.ndim - 2))


def changes_output(
    inputs_of: tuple[Change, ...], subject: Subject, shape: Shape, training: bool
) -> str | None:
    """Is the output the same after each of these changes of the input?"""
    x = values(shape, torch.float64)
    return _tells_apart([x, *(change(x) for change in inputs_of)], subject, shape, training)


def behind_layer(subject: Subject) -> list[Shape]:
    """Inputs that the convolution of the norm's slots may return."""
    return subject.with_dims(*(2, 3, 4, 5) if subject.slots.conv == "plain" else (4,))


@torch.no_grad()
def changes_with_weights(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Is the output the same if the weights of the preceding layer are scaled?

    The layer is a 1x1 convolution of the kind that the norm's slots set.
    """
    channels = subject.num_features
    layer = CONVOLUTIONS[subject.slots.conv](channels, channels, 1, bias=False).double()
    x = values(shape, torch.float64).reshape(*shape[:2], -1, 1)
    inputs = []
    for factor in (1.0, SCALES[0]):
        layer.weight.copy_(factor * values((channels, channels, 1, 1), torch.float64, seed=2))
        inputs.append(layer(x).reshape(shape))
    return _tells_apart(inputs, subject, shape, training)


def _tells_apart(
    inputs: list[Tensor], subject: Subject, shape: Shape, training: bool
) -> str | None:
    """Names a difference between the outputs; eps is tiny, as it breaks invariance to scale."""
    knobs: dict[str, Any] = {subject.eps_name: TINY_EPS} if subject.eps_name else {}
    norm = subject.trained(shape, **knobs).train(training)
    for module in norm.modules():  # also of norms whose signature has no eps
        for name in EPS_NAMES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, TINY_EPS)
    probe = Probe(norm)
    first, *others = (probe.observe(x).output for x in inputs)
    return "output" if any(moves(first, other) for other in others) else None


# ---------------------------------------------------------------- numbers


def effect_of_eps(subject: Subject, shape: Shape) -> Line:
    """By how much (root mean square) does the training output change if eps grows tenfold?"""
    name, eps = subject.eps_name, subject.eps_value
    if name is None or eps is None:
        return skipped("has no argument eps")
    x = SMALL_STD * values(shape, torch.float64)
    probes = [subject.probe(shape, True, **{name: factor * eps}) for factor in (1, 10)]
    effect = _distance(*(probe.observe(x).output for probe in probes))
    return measured(effect, f"eps {eps:g} to {10 * eps:g}, {show(shape)}")


def output_size(subject: Subject, shape: Shape) -> Line:
    """What is the root mean square of training outputs on standard normal inputs?

    If it grows with the batch size, larger batches gain from the scale alone.
    """
    out = Probe(subject.norm(shape, torch.float64)).observe(values(shape, torch.float64)).output
    return measured(_digits(float(out.square().mean().sqrt())), show(shape))


@torch.no_grad()
def gap_between_modes(subject: Subject, shape: Shape) -> Line:
    """How far apart (root mean square) are the outputs of both modes on a fresh batch?"""
    norm = subject.trained(shape)
    for seed in range(GAP_STEPS):
        norm(1 + 2 * values(shape, torch.float64, seed))
    x = 1 + 2 * values(shape, torch.float64, GAP_STEPS)
    evaluated, trained = norm.eval()(x), norm.train()(x)
    return measured(_distance(trained, evaluated), f"{GAP_STEPS} training batches {show(shape)}")


def batch_of(batch_size: int, subject: Subject) -> list[Shape]:
    """A batch of features if the norm takes those, else of small maps or texts."""
    num_dims = min(len(shape) for shape in subject.shapes)
    positions = {2: (), 3: (MAP[0] * MAP[1],), 4: MAP, 5: (*MAP, 1)}[num_dims]
    return [(batch_size, subject.num_features, *positions)]


def _distance(before: Tensor, after: Tensor) -> float:
    scale = before.square().mean().sqrt().clamp(min=1e-30)
    return _digits(float((after - before).square().mean().sqrt() / scale))


def _digits(value: float) -> float:
    """Rounds to two digits if small, otherwise to three places; 0 for rounding errors."""
    if value < 1e-9:
        return 0.0
    return float(f"{value:.2g}") if value < 0.1 else round(value, 3)


def _ignores(what: str, *changes: Change) -> Trait:
    return Trait(f"ignores {what}", partial(changes_output, changes), every, invariance=True)


_BY_SCALE = tuple(partial(operator.mul, factor) for factor in SCALES)
_BY_SHIFT = tuple(partial(operator.add, by) for by in SHIFTS)
TRAITS = (
    Trait("mixes samples", mixes_samples, with_many_samples),
    Trait("pools channels", pools_channels, every),
    Trait("pools positions", pools_positions, with_positions),
    Trait("leaks the future", leaks_future, texts),
    Trait("reads padding", reads_masked, padded_text),
    Check("running state", has_running_state, largest),
    _ignores("input scale", *_BY_SCALE),
    _ignores("input shift", *_BY_SHIFT),
    # One scale for all channels is a special case.
    _ignores("channel scales", scaled_by_channel, *_BY_SCALE),
    Trait("ignores scale of weights", changes_with_weights, behind_layer, invariance=True),
    Check("effect of eps x10, std 0.001", effect_of_eps, largest),
    *(Check(f"output size, batch of {n}", output_size, partial(batch_of, n)) for n in BATCHES),
    *(
        Check(f"train/eval gap, batch of {n}", gap_between_modes, partial(batch_of, n))
        for n in BATCHES
    ),
)
