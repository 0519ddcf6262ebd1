"""Contract: gradients, precision, and inputs at which a formula loses its digits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normexp.checks.probe import EVERYWHERE, Probe, change, changes, moved_state, moves
from normexp.checks.subject import (
    SMALL_STEP,
    Answer,
    Line,
    Shape,
    Subject,
    failed,
    measured,
    mode_name,
    show,
    skipped,
    values,
)
from normexp.errors import first_line
from normexp.norms.state import read_state

DRAWS = "draws random numbers, different ones in each dtype"

# ---------------------------------------------------------------- half precision

HALF_MEAN = 30.0  # squares in bfloat16 then keep no digit of a variance of 1
HALF_TOLERANCE = 0.03  # half precision may round the output, 2^-8 in bfloat16, not the statistics


def keeps_digits_in_half(subject: Subject, shape: Shape) -> Answer:
    """Do bfloat16 inputs at mean 30 give the outputs of float64, up to rounding?

    Parameters stay in float32, as in mixed precision, if the norm supports that.
    """
    if subject.computes_in_half:
        return failed(
            f"float64 inputs {SMALL_STEP:g} apart have one output, as if computed in half "
            f"precision, {show(subject.largest)}"
        )
    if subject.draws:
        return skipped(DRAWS)
    x = (HALF_MEAN + values(shape)).to(torch.bfloat16)
    try:
        try:
            out = subject.norm(shape)(x)
        except RuntimeError:  # the kernel needs one dtype for all tensors
            out = subject.norm(shape, torch.bfloat16)(x)
    except NotImplementedError:
        return skipped("this device lacks bfloat16")
    moved = change(subject.norm(shape, torch.float64)(x.double()), out)
    tolerated = moved <= HALF_TOLERANCE
    return None if tolerated else f"off by {moved:.2g} of the largest output at mean 30"


# ---------------------------------------------------------------- slope

CORNER = 0.05  # how far parameters are moved from values at which a gate may be clamped
SETTLING_STEPS = 128  # longer than the warm-up of norms whose backward moves state
# Step of the difference, relative and absolute tolerance: for float64, and for norms that always
# compute in float32.
BEND = 0.05  # of the change of an output over the step
FINE, COARSE = (1e-6, 1e-3, 1e-6), (1e-3, 1e-2, 1e-2)


def gradient_is_right(subject: Subject, shape: Shape, training: bool) -> Answer:
    """Does autograd agree with differences, for the input and every parameter?"""
    if subject.computes_in_half:
        return skipped("computes in half precision, too coarse for differences")
    norm = subject.trained(shape).train(training)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.where(parameter == 0, CORNER, (1 - CORNER) * parameter))
    steps = SETTLING_STEPS if training and _backward_moves_state(norm, shape) else 0
    for seed in range(steps):
        weights = values(shape, torch.float64, seed=seed + 1)
        (norm(values(shape, torch.float64, seed).requires_grad_()) * weights).sum().backward()
    if find_wrong_slope(norm, shape, *FINE) is None:
        return None
    wrong = find_wrong_slope(norm, shape, *COARSE)
    if wrong is not None:
        after = f" after {steps} steps" if steps else ""
        return f"gradient of {wrong} is not the slope of the output{after}"
    return Line(detail=f"only to 1 %, as the norm computes below float64, {show(shape)}")


def _backward_moves_state(norm: nn.Module, shape: Shape) -> bool:
    """True if a backward changes buffers, as in norms with statistics of gradients."""
    x, probe = values(shape, torch.float64), Probe(norm)
    states = (probe.observe(x, upstream=upstream).state for upstream in (None, EVERYWHERE))
    return moved_state(*states) is not None


def find_wrong_slope(
    norm: nn.Module, shape: Shape, step: float, relative: float, absolute: float
) -> str | None:
    """The input or parameter whose gradient is not the slope along a random direction, or None.

    The norm is in float64; every forward starts from the same state and random draws.
    """
    named = {n: p.detach().clone() for n, p in norm.named_parameters() if p.requires_grad}
    start = read_state(norm)

    def run(x: Tensor, *given: Tensor) -> Tensor:
        torch.default_generator.manual_seed(0)
        state = {name: value.clone() for name, value in start.items()}
        own = {**dict(zip(named, given, strict=True)), **state}
        return functional_call(norm, own, (x,))

    inputs = [t.requires_grad_() for t in (values(shape, torch.float64), *named.values())]
    out = run(*inputs)
    for index, name in enumerate(["the input", *named]):
        direction = values(tuple(inputs[index].shape), torch.float64, seed=4)
        with torch.no_grad():
            above, below = (
                run(*inputs[:index], inputs[index] + by * direction, *inputs[index + 1 :])
                for by in (step, -step)
            )
        # Outputs with a corner within the step, as of relu, have no slope to compare.
        bend, change = (above + below - 2 * out.detach()).abs(), (above - below).abs()
        weights = values(shape, torch.float64, 3) * (bend <= BEND * change + step * absolute)
        (gradient,) = torch.autograd.grad(
            out, inputs[index], weights, retain_graph=True, materialize_grads=True
        )
        slope = float(((above - below) * weights).sum() / (2 * step))
        error = abs(slope - float((gradient * direction).sum()))
        if not error <= absolute + relative * max(float(gradient.norm()), abs(slope)):
            return name
    return None


# ---------------------------------------------------------------- loss of digits

# Of float32 against float64 on the same inputs, relative to the largest output: rounding of the
# input alone leaves 6e-4 of a deviation of 1.
FAR_MEAN, FAR_TOLERANCE = 1e4, 0.05
MOST = 0.75  # of the outputs: a channel whose few values happen to be close keeps few digits
REFUSALS = (RuntimeError, ValueError, AssertionError, IndexError)
CONSTANT = 3.5  # its sums and means are exact, so a variance is 0


def keeps_digits_far_from_zero(subject: Subject, shape: Shape) -> Answer:
    """Does float32 give the outputs of float64, up to rounding?"""
    if subject.draws:
        return skipped(DRAWS)
    x = FAR_MEAN + values(shape)
    out = subject.norm(shape)(x)
    if not out.isfinite().all():
        return "not finite"
    exact = subject.norm(shape, torch.float64)(x.double())
    error = float(changes(exact, out).flatten().quantile(MOST))
    return f"off by {error:.2g} of the largest output" if error > FAR_TOLERANCE else None


def is_finite_on(
    transform: Callable[[Tensor], Tensor], subject: Subject, shape: Shape, training: bool
) -> str | None:
    """Are outputs, gradients and running state finite?"""
    probe = Probe(subject.trained(shape, torch.float32).train(training))
    found = probe.observe(transform(values(shape)), upstream=EVERYWHERE)
    parts = {
        "output": [found.output],
        "gradient": found.gradients,
        "running state": found.state.values(),
    }
    wrong = [name for name, own in parts.items() if not all(t.isfinite().all() for t in own)]
    return f"{wrong[0]} not finite" if wrong else None


def one_sample(subject: Subject) -> list[Shape]:
    return [(1, *shape[1:]) for shape in subject.shapes]


def one_position(subject: Subject) -> list[Shape]:
    shapes = {(*shape[:2], *[1] * len(shape[2:])) for shape in subject.with_dims(3, 4, 5)}
    return sorted(shapes, key=len)


def no_sample(subject: Subject) -> list[Shape]:
    return [(0, *subject.smallest[1:])]


@torch.no_grad()
def takes_little(subject: Subject, shape: Shape, training: bool) -> Answer:
    """Is so little refused, or its output finite, and in training not the same for all?"""
    norm = subject.norm(shape).train(training)
    try:
        out, other = norm(values(shape)), norm(values(shape, seed=1))
    except REFUSALS as error:
        return measured("refused", f"{mode_name(training)}, {show(shape)}: {first_line(error)}")
    if out.shape != shape:
        return f"an output of {show(out.shape)}"
    if not all(t.isfinite().all() for t in (out, *norm.buffers())):
        return "not finite"
    if training and out.numel() and not moves(out, other, tolerance=1e-6):
        return "every input has one output"
    return None
