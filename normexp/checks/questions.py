"""The table of questions about a norm by itself. A card and the contract are selections of it.

A new question is one row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from normexp.checks.network import EnteredSite, SiteOnMaps, name_some
from normexp.checks.norm import LoneNorm, NormCase, Shape, show
from normexp.checks.probe import (
    EVERYWHERE,
    MODES,
    Probe,
    change,
    moves,
    normal,
    unlike,
)
from normexp.checks.question import Answer, Question, Reply, measured, skipped
from normexp.checks.wiring import (
    find_stacking_fault,
    state_not_saved,
)
from normexp.errors import first_line
from normexp.norms.adapt import EPS_NAMES
from normexp.norms.site import Site, read_state, takes_mask

# ---------------------------------------------------------------- the contract

ON_CONSTANTS = " on a constant input"
ON_ZEROS = f"{ON_CONSTANTS}, 0"
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
    """Are outputs, gradients and running state finite, on constants and zeros too?"""
    probe = Probe(case.build().train(training), (case.values(),))
    zeros = torch.zeros_like(case.values())
    for what, x in (("", case.values()), (ON_CONSTANTS, zeros + CONSTANT), (ON_ZEROS, zeros)):
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
    return "two forwards of one input differ" if change(first, again) else None


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


# ---------------------------------------------------------------- traits: what it reads and ignores

PADDED = (4, 5)  # samples and positions
REAL = (5, 3, 2, 4)  # positions of each sample that are real
SCALES = tuple(partial(operator.mul, factor) for factor in (4.0, 0.3))
SHIFTS = tuple(partial(operator.add, by) for by in (3.0, -20.0))
TINY_EPS = 1e-12
EXACT = 1e-6  # of inputs in float64; a norm may compute in float32


def mixes_samples(case: NormCase, training: bool) -> Reply:
    """Do other samples move an output, a gradient or a running state?"""
    return case.probe(training).reads_across(0, gradients=training, state=True)


def pools_channels(case: NormCase, training: bool) -> Reply:
    """Do other channels move an output or a gradient?"""
    return case.probe(training).reads_across(1, gradients=training)


def pools_positions(case: NormCase, training: bool) -> Reply:
    """Do other positions move an output or a gradient?"""
    return case.probe(training).reads_across(2, gradients=training)


def reads_future(case: NormCase, training: bool) -> Reply:
    """Do later positions of a text (N, C, T) move an earlier output?"""
    return "output" if case.probe(training).reads_later() else None


def reads_masked(case: NormCase, training: bool) -> Reply:
    """Does the content or amount of masked positions move real outputs or the state?"""
    norm = case.trained(torch.float32)
    if not takes_mask(norm):
        return skipped("its forward has no argument `mask`; it is given the real positions only")
    mask = torch.arange(PADDED[1]) < torch.tensor(REAL)[:, None]
    module = SiteOnMaps(Site(norm, "sequence", None), torch.Size(PADDED[1:]))
    site = EnteredSite(["norm"], module, torch.Size(case.shape), mask)
    return "output" if site.probe(training, mask).reads_padding() else None


def changes_output(
    changes: tuple[Callable[[Tensor], Tensor], ...], case: NormCase, training: bool
) -> Reply:
    """Is the output the same after such a change of the input, with a tiny eps?"""
    knobs: dict[str, Any] = {case.lone.eps_name: TINY_EPS} if case.lone.eps_name else {}
    norm = case.trained(**knobs).train(training)
    for module in norm.modules():  # also of norms whose signature has no eps
        for name in EPS_NAMES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, TINY_EPS)
    x = case.values(torch.float64)
    probe = Probe(norm, (x,))
    first = probe.observe().output
    changed = any(moves(first, probe.observe(alter(x)).output) for alter in changes)
    return "output" if changed else None


def has_running_state(case: NormCase) -> Answer:
    """Does a training forward change buffers, parameters, or an attribute that remembers more?"""
    fresh, once, twice = (case.build() for _ in range(3))
    for norm, seeds in ((once, (0,)), (twice, (1, 0))):
        for seed in seeds:
            norm(1 + 2 * case.values(seed=seed))
    saved = fresh.state_dict(keep_vars=True)
    changed = [name for name in unlike(once, fresh) if name in saved]
    # An attribute that holds values of the last input alone is no state.
    changed += [name for name in unlike(twice, once) if name not in saved]
    return measured("yes", ", ".join(changed)) if changed else measured("no")


# ---------------------------------------------------------------- how it can be trained


def stacks(norm: LoneNorm) -> Answer:
    """Do two replicas under vmap get the outputs, gradients and state of each alone?"""
    if norm.draws:
        return skipped("draws random numbers, so each seed trains by itself")
    for case in map(norm.at, norm.shapes):
        sites: list[nn.Module] = [Site(case.trained(), "map", None) for _ in range(2)]
        x = torch.stack([case.values(torch.float64, seed) for seed in (3, 4)])
        batch = {"inputs": x.requires_grad_()}
        if fault := find_stacking_fault(sites, batch, tolerance=EXACT):
            return measured("no", f"{fault}, {show(case.shape)}")
    return measured("yes")


# ---------------------------------------------------------------- the table


def every(norm: LoneNorm) -> list[Shape]:
    return list(norm.shapes)


def largest(norm: LoneNorm) -> list[Shape]:
    return list(norm.shapes[-1:])


def padded_text(norm: LoneNorm) -> list[Shape]:
    shape = (PADDED[0], norm.num_features, PADDED[1])
    return [shape] if shape in norm.shapes else []


trait = partial(Question, section="traits")
shows = partial(trait, says="moves")
same = partial(trait, says="same", shapes=every)

BUILT = "can be built"  # answered by opening the norm
OF_NORMS = (
    Question("parameters made at once", makes_parameters_at_once),
    Question("shape kept", keeps_shape),
    Question("finite", is_finite, shapes=every, modes=MODES),
    Question("dtype kept", keeps_dtype),
    Question("gradient for every parameter", reaches_parameters, shapes=largest),
    Question("gradient", gradient_is_right, shapes=every, modes=MODES),
    Question("buffers saved", saves_state, shapes=every),
    Question("deterministic in evaluation", is_deterministic, shapes=every),
    Question("statistics wide in bfloat16", keeps_digits_in_half, shapes=every),
    shows("mixes samples", mixes_samples, shapes=every),
    shows("pools channels", pools_channels, shapes=every),
    shows("pools positions", pools_positions, shapes=lambda norm: norm.with_dims(3, 4, 5)),
    shows("reads the future", reads_future, shapes=lambda norm: norm.with_dims(3)),
    shows("reads padding", reads_masked, shapes=padded_text),
    same("ignores input scale", partial(changes_output, SCALES)),
    same("ignores input shift", partial(changes_output, SHIFTS)),
    trait("running state", has_running_state, shapes=largest),
    trait("replicas under vmap", stacks),
)
CONTRACT = (BUILT, *(question.name for question in OF_NORMS if question.section == "contract"))
