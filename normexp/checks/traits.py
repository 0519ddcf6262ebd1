"""Traits of a norm: the dependences and invariances of its output, and their size."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from normexp.checks.preflight import EXTRA_POSITIONS, reads_padding
from normexp.checks.probe import Probe, moves
from normexp.checks.sites import SiteOnMaps
from normexp.checks.subject import (
    MODES,
    Check,
    Finding,
    Shape,
    Subject,
    accepts,
    measured,
    mode_name,
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

# What moves in the mode of the probe, "" if nothing does.
Question = Callable[[Probe, Tensor], str]


def in_modes(
    shapes_of: Callable[[Subject], list[Shape]], question: Question, subject: Subject
) -> Finding:
    """`yes`, `no`, `in training` or `in evaluation`, with the smallest input that shows it."""
    shapes = shapes_of(subject)
    shown: dict[bool, str] = {}
    for training in MODES:
        for shape in shapes:
            probe = Probe(subject.trained(shape, torch.float64).train(training))
            moved = question(probe, values(shape, torch.float64))
            if moved:
                shown[training] = show(shape) + ("" if moved == "output" else f", {moved}")
                break
    return _phrase(shown) if shapes else skipped("no input that it takes could show it")


def _phrase(shown: dict[bool, str]) -> Finding:
    """The modes that show a trait, with the detail of the first."""
    if not shown:
        return measured("no")
    only = "in training" if True in shown else "in evaluation"
    return measured("yes" if len(shown) == 2 else only, next(iter(shown.values())))


def _with_many_samples(subject: Subject) -> list[Shape]:
    many = (MANY, *subject.smallest[1:])
    return [*subject.shapes, *([many] if accepts(subject, many) else [])]


def _with_positions(subject: Subject) -> list[Shape]:
    """Inputs with positions, also with many in a row."""
    own = [shape for shape in subject.shapes if len(shape) > 2]
    long = [(*shape[:-1], MANY) for shape in own[:1]]
    return own + [shape for shape in long if accepts(subject, shape)]


def _texts(subject: Subject) -> list[Shape]:
    return [shape for shape in _with_positions(subject) if len(shape) == 3]


def mixes_samples(subject: Subject) -> Finding:
    """Do other samples move an output, a gradient or a running state?"""

    def reads(probe: Probe, x: Tensor) -> str:
        return probe.reads_samples(x, training=probe.module.training) or ""

    return in_modes(_with_many_samples, reads, subject)


def pools_channels(subject: Subject) -> Finding:
    """Do other channels move an output or a gradient?"""

    def reads(probe: Probe, x: Tensor) -> str:
        return probe.reads_across(x, 1, gradients=probe.module.training) or ""

    return in_modes(lambda subject: list(subject.shapes), reads, subject)


def pools_positions(subject: Subject) -> Finding:
    """Do other positions move an output or a gradient?"""

    def reads(probe: Probe, x: Tensor) -> str:
        moved = probe.reads_across(x, 2, gradients=probe.module.training)
        # Later positions are other positions, so the two lines agree.
        return moved or (_reads_later(probe, x) if x.ndim == 3 else "")

    return in_modes(_with_positions, reads, subject)


def leaks_future(subject: Subject) -> Finding:
    """Do later positions of a text (N, C, T) move an earlier output?"""
    return in_modes(_texts, _reads_later, subject)


def _reads_later(probe: Probe, x: Tensor) -> str:
    return "" if probe.reads_later(x, 2) is None else "output"


def reads_masked(subject: Subject) -> Finding:
    """Does the content or amount of masked positions move real outputs or the state?"""
    shape = (PADDED[0], subject.num_features, PADDED[1])
    if shape not in subject.shapes:
        return skipped("takes no texts (N, C, T)")
    norm = subject.trained(shape)
    if not takes_mask(norm):
        return skipped("its forward has no argument `mask`; it is given the real positions only")
    mask = torch.arange(PADDED[1]) < torch.tensor(REAL)[:, None]
    module = SiteOnMaps(Site(norm, "sequence", None), torch.Size(PADDED[1:]))
    x = values((*shape[:2], PADDED[1] + EXTRA_POSITIONS))
    reads = [mode for mode in MODES if reads_padding(Probe(module.train(mode)), x, mask)]
    return _phrase({mode: show(shape) for mode in reads})


def has_running_state(subject: Subject) -> Finding:
    """Does a training forward change buffers?"""
    shape = subject.largest
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


def is_invariant(changes: tuple[Change, ...], subject: Subject) -> Finding:
    """Is the output the same after each of these changes of the input?"""
    return _keeps_outputs(subject, lambda x: [x, *(change(x) for change in changes)])


def _keeps_outputs(subject: Subject, inputs_of: Callable[[Tensor], list[Tensor] | None]) -> Finding:
    """Finds the modes in which all inputs have the same output.

    Uses a tiny eps, because a larger eps slightly breaks invariance to scale.

    Args:
        inputs_of: makes the inputs to compare from one input; None if its shape does not suit.
    """
    knobs = {} if subject.eps_name is None else {subject.eps_name: TINY_EPS}
    moved: dict[bool, str] = {}
    looked = False
    for training in MODES:
        for shape in subject.shapes:
            inputs = inputs_of(values(shape, torch.float64))
            if inputs is None:
                continue
            looked = True
            norm = subject.trained(shape, torch.float64, **knobs)
            probe = Probe(_with_small_eps(norm).train(training))
            first, *others = (probe.observe(x).output for x in inputs)
            if any(moves(first, other) for other in others):
                moved[training] = f"it moves the output {mode_name(training)}, {show(shape)}"
                break
    if not looked:
        return skipped("no input that it takes could show it")
    if not moved:
        return measured("yes")
    kept = "no" if len(moved) == 2 else "in evaluation" if True in moved else "in training"
    return measured(kept, next(iter(moved.values())))


def _with_small_eps(norm: nn.Module) -> nn.Module:
    """Sets each attribute eps, also of norms whose signature has none."""
    for module in norm.modules():
        for name in EPS_NAMES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, TINY_EPS)
    return norm


def invariance_to_weights(subject: Subject) -> Finding:
    """Is the output the same if the weights of the layer before are scaled?

    The layer is the convolution set by the norm's slots, or linear if the norm takes no maps.
    """
    build = CONVOLUTIONS[subject.slots.conv]
    channels = subject.num_features
    layers = [build(channels, channels, 1, bias=False).double() for _ in range(2)]
    weight = values((channels, channels, 1, 1), torch.float64, seed=2)
    with torch.no_grad():
        for layer, factor in zip(layers, (1.0, SCALES[0]), strict=True):
            layer.weight.copy_(factor * weight)

    @torch.no_grad()
    def inputs_of(x: Tensor) -> list[Tensor] | None:
        if subject.slots.conv != "plain" and x.ndim != 4:
            return None
        maps = x.reshape(*x.shape[:2], -1, 1)
        return [layer(maps).reshape(x.shape) for layer in layers]

    return _keeps_outputs(subject, inputs_of)


# ---------------------------------------------------------------- numbers


def effect_of_eps(subject: Subject) -> Finding:
    """By how much does the training output change, root mean square, if eps grows tenfold?"""
    name, eps = subject.eps_name, subject.eps_value
    if name is None or eps is None:
        return skipped("has no argument eps")
    shape = subject.largest
    x = SMALL_STD * values(shape, torch.float64)
    outs = [
        Probe(subject.trained(shape, torch.float64, **{name: factor * eps})).observe(x).output
        for factor in (1, 10)
    ]
    return measured(_difference(*outs), f"eps {eps:g} to {10 * eps:g}, {show(shape)}")


def output_size(batch_size: int, subject: Subject) -> Finding:
    """What is the root mean square of training outputs on standard normal inputs?

    If it grows with the batch size, larger batches gain from the scale alone.
    """
    shape = _batch_of(batch_size, subject)
    out = Probe(subject.norm(shape, torch.float64)).observe(values(shape, torch.float64)).output
    return measured(_digits(float(out.square().mean().sqrt())), show(shape))


def gap_between_modes(batch_size: int, subject: Subject) -> Finding:
    """How far apart are the outputs of both modes on a fresh batch, root mean square?"""
    shape = _batch_of(batch_size, subject)
    norm = subject.trained(shape, torch.float64)
    with torch.no_grad():
        for seed in range(GAP_STEPS):
            norm(1 + 2 * values(shape, torch.float64, seed))
        x = 1 + 2 * values(shape, torch.float64, GAP_STEPS)
        evaluated, trained = norm.eval()(x), norm.train()(x)
    return measured(_difference(trained, evaluated), f"{GAP_STEPS} training batches {show(shape)}")


def _batch_of(batch_size: int, subject: Subject) -> Shape:
    """A batch of features if the norm takes those, else of small maps or texts."""
    num_dims = min(len(shape) for shape in subject.shapes)
    positions = {2: (), 3: (MAP[0] * MAP[1],), 4: MAP, 5: (*MAP, 1)}[num_dims]
    return (batch_size, subject.num_features, *positions)


def _difference(before: Tensor, after: Tensor) -> float:
    scale = before.square().mean().sqrt().clamp(min=1e-30)
    return _digits(float((after - before).square().mean().sqrt() / scale))


def _digits(value: float) -> float:
    """Rounds to two digits if small, otherwise to three places; 0 for rounding errors."""
    if value < 1e-9:
        return 0.0
    return float(f"{value:.2g}") if value < 0.1 else round(value, 3)


_BY_SCALE = tuple(partial(operator.mul, factor) for factor in SCALES)
_BY_SHIFT = tuple(partial(operator.add, by) for by in SHIFTS)
TRAITS = (
    Check("mixes samples", mixes_samples),
    Check("pools channels", pools_channels),
    Check("pools positions", pools_positions),
    Check("leaks the future", leaks_future),
    Check("reads padding", reads_masked),
    Check("running state", has_running_state),
    Check("ignores input scale", partial(is_invariant, _BY_SCALE)),
    Check("ignores input shift", partial(is_invariant, _BY_SHIFT)),
    # One scale for all channels is a special case.
    Check("ignores channel scales", partial(is_invariant, (scaled_by_channel, *_BY_SCALE))),
    Check("ignores scale of weights", invariance_to_weights),
    Check("effect of eps x10, std 0.001", effect_of_eps),
    *(Check(f"output size, batch of {n}", partial(output_size, n)) for n in BATCHES),
    *(Check(f"train/eval gap, batch of {n}", partial(gap_between_modes, n)) for n in BATCHES),
)
