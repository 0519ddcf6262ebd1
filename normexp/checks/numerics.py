"""Contract: gradients, precision, and inputs at which a formula loses its digits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normexp.checks.probe import Probe
from normexp.checks.subject import (
    MODES,
    Answer,
    Finding,
    Shape,
    Subject,
    measured,
    mode_name,
    relative_change,
    show,
    skipped,
    values,
)
from normexp.errors import first_line
from normexp.norms.state import read_state

DRAWS = "draws random numbers, different ones in each dtype"

# ---------------------------------------------------------------- half precision

SMALL_STEP = 1e-6  # from 1, visible in float32 but not in half precision
HALF_MEAN = 30.0  # squares in bfloat16 then keep no digit of a variance of 1
HALF_TOLERANCE = 0.03  # half precision may round the output, 2^-8 in bfloat16, not the statistics


def keeps_digits_in_half(subject: Subject) -> Answer:
    """Do bfloat16 inputs at mean 30 give the outputs of float64, up to rounding?

    Parameters stay in float32, as in mixed precision, if the norm supports that.
    """
    if computes_in_half(subject):
        return (
            f"float64 inputs {SMALL_STEP:g} apart have one output, as if computed in half "
            f"precision, {show(subject.largest)}"
        )
    if subject.draws:
        return skipped(DRAWS)
    for shape in subject.shapes:
        x = (HALF_MEAN + values(shape)).to(torch.bfloat16)
        try:
            out = _in_bfloat16(subject, x)
        except NotImplementedError:
            return skipped("this device lacks bfloat16")
        change = relative_change(subject.norm(shape, torch.float64)(x.double()), out)
        if change > HALF_TOLERANCE:
            return f"off by {change:.2g} of the largest output at mean 30, {show(shape)}"
    return None


def _in_bfloat16(subject: Subject, x: Tensor) -> Tensor:
    shape = tuple(x.shape)
    try:
        return subject.norm(shape)(x)
    except NotImplementedError:
        raise
    except RuntimeError:  # the kernel needs one dtype for all tensors
        return subject.norm(shape, torch.bfloat16)(x)


def computes_in_half(subject: Subject) -> bool:
    """True if a small step of a float64 input moves almost no output that a large step moves."""
    shape = subject.largest
    x, direction = values(shape, torch.float64), values(shape, torch.float64, 1)
    probe = Probe(subject.trained(shape, torch.float64))
    outs = [probe.observe(x + step * direction).output for step in (0.0, SMALL_STEP, 1.0)]
    small, large = (int((out != outs[0]).sum()) for out in outs[1:])
    return small < 0.1 * large


# ---------------------------------------------------------------- slope

CORNER = 0.05  # how far parameters are moved from values at which a gate may be clamped
SETTLING_STEPS = 128  # longer than the warm-up of norms whose backward moves state
# Step of the difference, relative and absolute tolerance: for float64, and for norms that always
# compute in float32.
BEND = 0.05  # of the change of an output over the step
FINE, COARSE = (1e-6, 1e-3, 1e-6), (1e-3, 1e-2, 1e-2)


def gradient_is_right(training: bool, subject: Subject) -> Answer:
    """Does autograd agree with differences, for the input and every parameter?"""
    if computes_in_half(subject):
        return skipped("computes in half precision, too coarse for differences")
    coarse = ""
    for shape in subject.shapes:
        norm = subject.trained(shape, torch.float64).train(training)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(torch.where(parameter == 0, CORNER, (1 - CORNER) * parameter))
        settled = training and _backward_moves_state(norm, shape)
        if settled:
            for seed in range(SETTLING_STEPS):
                weights = values(shape, torch.float64, seed=seed + 1)
                out = norm(values(shape, torch.float64, seed).requires_grad_())
                (out * weights).sum().backward()
        wrong = find_wrong_slope(norm, shape, *FINE)
        if wrong is None:
            continue
        wrong = find_wrong_slope(norm, shape, *COARSE)
        if wrong is not None:
            after = f" after {SETTLING_STEPS} steps" if settled else ""
            where = f"{mode_name(training)}, {show(shape)}"
            return f"gradient of {wrong} is not the slope of the output{after}, {where}"
        coarse = f"only to 1 %, as the norm computes below float64, {show(shape)}"
    return Finding("pass", detail=coarse)


def _backward_moves_state(norm: nn.Module, shape: Shape) -> bool:
    """True if a backward changes buffers, as in norms with statistics of gradients."""
    out = norm(values(shape, torch.float64).requires_grad_())
    before = read_state(norm)
    if out.requires_grad:
        (out * values(shape, torch.float64, seed=3)).sum().backward()
    return any(not torch.equal(value, before[name]) for name, value in read_state(norm).items())


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


def keeps_digits_far_from_zero(subject: Subject) -> Answer:
    """Does float32 give the outputs of float64, up to rounding?"""
    if subject.draws:
        return skipped(DRAWS)
    for shape in subject.shapes:
        x = FAR_MEAN + values(shape)
        out = subject.norm(shape)(x)
        if not out.isfinite().all():
            return f"not finite, {show(shape)}"
        exact = subject.norm(shape, torch.float64)(x.double()).detach()
        error = ((out - exact).abs() / exact.abs().amax().clamp(min=1e-30)).detach().flatten()
        change = float(error.quantile(MOST))
        if change > FAR_TOLERANCE:
            return f"off by {change:.2g} of the largest output, {show(shape)}"
    return None


def is_finite_on(
    transform: Callable[[Tensor], Tensor], subject: Subject, shape: Shape, training: bool
) -> str | None:
    """Are outputs, gradients and running state finite?"""
    probe = Probe(subject.trained(shape).train(training))
    found = probe.observe(transform(values(shape)), upstream=torch.ones(1, dtype=torch.bool))
    slopes = [*found.parameter_gradients.values(), found.input_gradient]
    parts = {"output": [found.output], "gradient": slopes, "running state": found.state.values()}
    for name, tensors in parts.items():
        if not all(tensor.isfinite().all() for tensor in tensors if tensor is not None):
            return f"{name} not finite"
    return None


def takes_one_sample(subject: Subject) -> Answer:
    """Is one sample refused, or its output finite?"""
    return _on_little([(1, *shape[1:]) for shape in subject.shapes], subject)


def takes_one_position(subject: Subject) -> Answer:
    """Is one position refused, or its output finite and not the same for all?"""
    shapes = {(*shape[:2], *[1] * len(shape[2:])) for shape in subject.shapes if len(shape) > 2}
    return _on_little(sorted(shapes, key=len), subject) if shapes else skipped("takes no positions")


def takes_empty_batch(subject: Subject) -> Answer:
    """Is an empty batch refused, or harmless?"""
    return _on_little([(0, *subject.smallest[1:])], subject)


def _on_little(shapes: list[Shape], subject: Subject) -> Answer:
    """Inputs with few values per statistic: no NaN, and in training outputs follow the input."""
    refusal = ""
    for shape in shapes:
        norm = subject.norm(shape)
        for training in MODES:
            norm.train(training)
            try:
                with torch.no_grad():
                    out, other = norm(values(shape)), norm(values(shape, seed=1))
            except REFUSALS as error:
                refusal = refusal or f"{mode_name(training)}, {show(shape)}: {first_line(error)}"
                continue
            if out.shape != shape:
                return f"{show(shape)} in, {show(tuple(out.shape))} out"
            if not all(t.isfinite().all() for t in (out, *norm.buffers())):
                return f"not finite, {mode_name(training)}, {show(shape)}"
            if training and out.numel() and relative_change(out, other) < 1e-6:
                return f"every input has one output, {mode_name(True)}, {show(shape)}"
    return measured("refused", refusal) if refusal else None
