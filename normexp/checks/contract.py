"""The questions of the contract: is a norm, by itself, right to train with?"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from normexp.checks.norm import (
    Answer,
    LoneNorm,
    NormCase,
    Reply,
    show,
    skipped,
)
from normexp.checks.probe import EVERYWHERE, MODES, Probe, change, moves, normal
from normexp.checks.wiring import name_some, state_not_saved
from normexp.errors import first_line
from normexp.norms.site import read_state

ON_CONSTANTS = " on a constant input"
CONSTANT = 3.5  # its sums and means are exact, so a variance is 0
HALF_MEAN = 30.0  # squares in bfloat16 then keep no digit of a variance of 1
HALF_TOLERANCE = 0.03  # half precision may round the output, 2^-8 in bfloat16, not the statistics
CORNER = 0.05  # moves parameters off values at which a gate may be clamped
SETTLING_STEPS = 128  # longer than the warm-up of norms whose backward moves state
BEND = 0.05  # share of an output's change over the step; outputs that bend more are left out
# Step of the difference, relative and absolute tolerance: for float64, and for norms that always
# compute in float32.
FINE, COARSE = (1e-6, 1e-3, 1e-6), (1e-3, 1e-2, 1e-2)


def keeps_shape(norm: LoneNorm) -> Reply:
    """Is any input mapped to its own shape?"""
    return norm.problem or None


def keeps_dtype(norm: LoneNorm) -> Reply:
    """Does the output have the dtype of the input?"""
    missing, case = [], norm.at(norm.shapes[0])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for training in MODES:
            try:
                out = case.build(dtype).train(training)(case.values(dtype))
            except Exception as error:  # of foreign code, any kind
                known = isinstance(error, NotImplementedError) or "not implemented" in str(error)
                if not known:
                    return f"{name} {show(case.shape)}: {first_line(error)}"
                missing.append(name)
                break
            if out.dtype != dtype:
                return f"{name} in, {str(out.dtype).removeprefix('torch.')} out"
    return Answer(detail=f"this device lacks {', '.join(missing)}" if missing else "")


def is_finite(case: NormCase, training: bool) -> Reply:
    """Are outputs, gradients and running state finite, on constants too?"""
    probe = Probe(case.build().train(training), (case.values(),))
    for what, x in (("", case.values()), (ON_CONSTANTS, 0 * case.values() + CONSTANT)):
        step = probe.observe(x, upstream=EVERYWHERE)
        results = {"the output": step.output}
        results |= {f"the gradient of {name}": g for name, g in step.gradients.items()}
        results |= {f"running state {name}": value for name, value in step.state.items()}
        if names := [name for name, values in results.items() if not values.isfinite().all()]:
            return (
                f"{name_some(names)} not finite{what}; bound what it divides by, or takes a root, "
                "power or logarithm of, as with eps or clamp"
            )
    return None


def gradient_is_right(case: NormCase, training: bool) -> Reply:
    """Does autograd agree with differences, for the input and every parameter?"""
    norm = case.trained().train(training)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.where(parameter == 0, CORNER, (1 - CORNER) * parameter))
    probe = Probe(norm, (case.values(torch.float64),))
    plain, after_backward = (probe.observe(upstream=up).state for up in (None, EVERYWHERE))
    moved = any(moves(value, after_backward[name]) for name, value in plain.items())
    for seed in range(SETTLING_STEPS if training and moved else 0):
        weights = case.values(torch.float64, seed=seed + 1)
        (norm(case.values(torch.float64, seed).requires_grad_()) * weights).sum().backward()
    if find_wrong_slope(norm, case, *FINE) is None:
        return None
    wrong = find_wrong_slope(norm, case, *COARSE)
    if wrong is not None:
        return f"gradient of {wrong} is not the slope of the output"
    return Answer(detail=f"only to 1 %, as the norm computes below float64, {show(case.shape)}")


def find_wrong_slope(
    norm: nn.Module, case: NormCase, step: float, relative: float, absolute: float
) -> str | None:
    """The input or parameter whose gradient is not the slope along a random direction, or None.

    The norm is in float64; every forward starts from the same state and random draws. torch's
    gradcheck would refuse norms that compute in float32 inside.
    """
    named = {n: p.detach().clone() for n, p in norm.named_parameters() if p.requires_grad}
    start = read_state(norm)

    def run(x: Tensor, *given: Tensor) -> Tensor:
        torch.default_generator.manual_seed(0)
        state = {name: value.clone() for name, value in start.items()}
        return functional_call(norm, {**dict(zip(named, given, strict=True)), **state}, (x,))

    inputs = [t.requires_grad_() for t in (case.values(torch.float64), *named.values())]
    out = run(*inputs)
    for index, name in enumerate(["the input", *named]):
        direction = normal(inputs[index].shape, seed=4)
        with torch.no_grad():
            above, below = (
                run(*inputs[:index], inputs[index] + by * direction, *inputs[index + 1 :])
                for by in (step, -step)
            )
        # Outputs with a corner within the step, as of relu, have no slope to compare.
        bend, moved = (above + below - 2 * out.detach()).abs(), (above - below).abs()
        weights = case.values(torch.float64, 3) * (bend <= BEND * moved + step * absolute)
        (gradient,) = torch.autograd.grad(
            out, inputs[index], weights, retain_graph=True, materialize_grads=True
        )
        slope = float(((above - below) * weights).sum() / (2 * step))
        error = abs(slope - float((gradient * direction).sum()))
        if not error <= absolute + relative * max(float(gradient.norm()), abs(slope)):
            return name
    return None


def reaches_parameters(case: NormCase) -> Reply:
    """Does one backward reach every parameter?"""
    norm = case.trained(torch.float32)
    parameters = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    if parameters:
        (norm(case.values().requires_grad_()) * case.values(seed=1)).sum().backward()
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    return f"no gradient reaches {', '.join(without)}" if without else None


def saves_state(case: NormCase) -> Reply:
    """Does a norm restored from its state_dict go on as the original?"""
    return state_not_saved(case.build(), (case.values(),))


@torch.no_grad()
def is_deterministic(case: NormCase) -> Reply:
    """Do two forwards of one input agree in evaluation?"""
    norm = case.trained(torch.float32).eval()
    first, _, again = norm(case.values()), norm(case.values(seed=1)), norm(case.values())
    return "two forwards of one input differ" if moves(first, again, tolerance=0) else None


def keeps_digits_in_half(case: NormCase) -> Reply:
    """Do bfloat16 inputs at mean 30 give the outputs of float64, up to rounding?

    Parameters stay in float32, as in mixed precision, if the norm supports that.
    """
    if case.lone.draws:
        return skipped("draws random numbers, different ones in each dtype")
    x = (HALF_MEAN + case.values()).to(torch.bfloat16)
    try:
        try:
            out = case.build()(x)
        except RuntimeError:  # the kernel needs one dtype for all tensors
            out = case.build(torch.bfloat16)(x)
    except NotImplementedError:
        return skipped("this device lacks bfloat16")
    moved = change(case.build(torch.float64)(x.double()), out)
    if moved <= HALF_TOLERANCE:
        return None
    return (
        f"off by {moved:.2g} of the largest output at mean 30; compute statistics in float32, as "
        "of x.float(), and return x.dtype"
    )


def makes_parameters_at_once(norm: LoneNorm) -> Reply:
    """Does __init__ make every parameter, in time for the optimizer?"""
    case = norm.at(norm.shapes[0] if norm.shapes else (3, norm.num_features))
    module = case.build()
    before = dict(module.named_parameters())
    with suppress(Exception):  # no input may be taken
        module(case.values())
    made = [name for name, p in module.named_parameters() if p is not before.get(name)]
    made = [name for name, p in before.items() if is_lazy(p)] or made
    return f"{made[0]} is made in the forward, too late for an optimizer" if made else None
