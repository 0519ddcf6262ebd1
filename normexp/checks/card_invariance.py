"""Traits: what an output does not depend on, and by how much on eps, batch size and mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from normexp.checks.card import Checks, Finding, measured, skipped
from normexp.checks.sites import moved_places
from normexp.checks.subject import Shape, Subject, show, values
from normexp.norms.parts import CONVOLUTIONS

FACTOR = 4.0  # of a scale that should not count
SMALL_STD = 1e-3  # its variance, 1e-6, lies below the usual eps
BATCHES = (4, 32)
MAP = (4, 4)  # positions per sample where batches are compared
GAP_STEPS = 60  # training batches, after which 0.2 % is left of a start at momentum 0.1

# Two inputs that should give one output; None where an input of this shape cannot be made.
Pair = Callable[[Tensor], tuple[Tensor, Tensor] | None]


def is_invariant(pair: Pair, subject: Subject) -> Finding:
    """In which modes all outputs are kept; the detail is the smallest input that moves them.

    eps is made 1e-12 for it, as any larger one breaks an invariance to scale a little.
    """
    knobs = {} if subject.eps_name is None else {subject.eps_name: 1e-12}
    moved: dict[bool, Shape] = {}
    looked = False
    for training in (True, False):
        for shape in subject.shapes:
            inputs = pair(values(shape, torch.float64))
            if inputs is None:
                continue
            looked = True
            with torch.no_grad():
                before, after = (
                    subject.trained(shape, torch.float64, **knobs).train(training)(x)
                    for x in inputs
                )
            if moved_places(before, after).any():
                moved[training] = shape
                break
    if not looked:
        return skipped("no input that it takes could show it")
    if not moved:
        return measured("yes")
    kept = "no" if len(moved) == 2 else "in evaluation" if True in moved else "in training"
    return measured(kept, f"moved at {show(min(moved.values(), key=len))}")


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, FACTOR * x


def _shifted(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x + 3


def _scaled_by_channel(x: Tensor) -> tuple[Tensor, Tensor]:
    factors = torch.linspace(0.5, FACTOR, x.shape[1], dtype=x.dtype)
    return x, x * factors.view(-1, *[1] * (x.ndim - 2))


def invariance_to_weights(subject: Subject) -> Finding:
    """To the size of the weights of a layer without bias right before the norm.

    The layer is the convolution that the norm's slots ask for, or linear where it takes no maps.
    """
    build = CONVOLUTIONS[subject.slots.conv]
    channels = subject.num_features
    layers = [build(channels, channels, 1, bias=False).double() for _ in range(2)]
    weight = values((channels, channels, 1, 1), torch.float64, seed=2)
    with torch.no_grad():
        for layer, factor in zip(layers, (1.0, FACTOR), strict=True):
            layer.weight.copy_(factor * weight)
    only_maps = subject.slots.conv != "plain"

    def pair(x: Tensor) -> tuple[Tensor, Tensor] | None:
        if only_maps and x.ndim != 4:
            return None
        maps = x.reshape(*x.shape[:2], -1, 1)
        with torch.no_grad():
            outs = [layer(maps).reshape(x.shape) for layer in layers]
        return outs[0], outs[1]

    return is_invariant(pair, subject)


def effect_of_eps(std: float, subject: Subject) -> Finding:
    """Relative change of the output, root mean square, in training when eps grows tenfold."""
    name, eps = subject.eps_name, subject.eps_value
    if name is None or eps is None:
        return skipped("has no argument eps")
    shape = subject.largest
    x = std * values(shape, torch.float64)
    with torch.no_grad():
        outs = [
            subject.trained(shape, torch.float64, **{name: factor * eps}).train()(x)
            for factor in (1, 10)
        ]
    return measured(_difference(*outs), f"eps {eps:g} to {10 * eps:g}, {show(shape)}")


def output_size(batch_size: int, subject: Subject) -> Finding:
    """Root mean square of training outputs on standard normal inputs, with first parameters.

    One that grows with the batch size is a gain that batch size alone brings.
    """
    shape = _batch_of(batch_size, subject)
    if shape is None:
        return skipped("takes no batch of that size")
    with torch.no_grad():
        out = subject.norm(shape, torch.float64)(values(shape, torch.float64))
    return measured(_digits(float(out.square().mean().sqrt())), show(shape))


def gap_between_modes(batch_size: int, subject: Subject) -> Finding:
    """Relative difference, root mean square, of both modes' outputs on a fresh batch."""
    shape = _batch_of(batch_size, subject)
    if shape is None:
        return skipped("takes no batch of that size")
    norm = subject.trained(shape, torch.float64)
    with torch.no_grad():
        for seed in range(GAP_STEPS):
            norm(1 + 2 * values(shape, torch.float64, seed))
        x = 1 + 2 * values(shape, torch.float64, GAP_STEPS)
        evaluated = norm.eval()(x)
        trained = norm.train()(x)
    return measured(_difference(trained, evaluated), f"{GAP_STEPS} training batches {show(shape)}")


def _batch_of(batch_size: int, subject: Subject) -> Shape | None:
    """A batch of features where the norm takes those, else of small maps or texts."""
    num_dims = sorted({len(shape) for shape in subject.shapes})
    if not num_dims:
        return None
    positions = {2: (), 3: (MAP[0] * MAP[1],), 4: MAP, 5: (*MAP, 1)}[num_dims[0]]
    return (batch_size, subject.num_features, *positions)


def _difference(before: Tensor, after: Tensor) -> float:
    scale = before.square().mean().sqrt().clamp(min=1e-30)
    return _digits(float((after - before).square().mean().sqrt() / scale))


def _digits(value: float) -> float:
    """Two digits of a small number, three places of another; what rounding leaves is 0."""
    if value < 1e-9:
        return 0.0
    return float(f"{value:.2g}") if value < 0.1 else round(value, 3)


INVARIANCE: Checks = {
    "invariant to input scale": partial(is_invariant, _scaled),
    "invariant to input shift": partial(is_invariant, _shifted),
    "invariant to channel scales": partial(is_invariant, _scaled_by_channel),
    "invariant to weight scale": invariance_to_weights,
    "effect of eps x10 at std 1": partial(effect_of_eps, 1.0),
    "effect of eps x10 at std 0.001": partial(effect_of_eps, SMALL_STD),
    **{f"output size, batch of {size}": partial(output_size, size) for size in BATCHES},
    **{f"train/eval gap, batch of {size}": partial(gap_between_modes, size) for size in BATCHES},
}
