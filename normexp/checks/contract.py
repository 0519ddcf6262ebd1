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
    arguments_of,
    show,
    skipped,
)
from normexp.checks.probe import EVERYWHERE, MODES, Probe, change, moves, normal
from normexp.checks.wiring import name_some, state_not_saved
from normexp.errors import first_line
from normexp.norms.state import read_state

STEPS = 3  # of training
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
MOMENTUM = 0.3  # far from 1 - MOMENTUM
EXACT = 1e-4  # relative, of an average that follows a statistic


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


@torch.no_grad()
def keeps_state_in_evaluation(case: NormCase) -> Reply:
    """Does evaluation leave the buffers alone?"""
    norm = case.trained(torch.float32).eval()
    before = read_state(norm)
    norm(case.values())
    after = read_state(norm)
    changed = [n for n, b in before.items() if moves(b, after[n], tolerance=0)]
    if changed:
        return f"evaluation changes {changed[0]}"
    return None if before else skipped("has no buffers")


def takes_any_strides(case: NormCase, training: bool) -> Reply:
    """Does an input that is not contiguous give the output of its contiguous copy?"""
    x = case.values()
    others = [x.transpose(0, -1).contiguous().transpose(0, -1)]
    if x.ndim == 4:
        others.append(x.contiguous(memory_format=torch.channels_last))
    out = case.build().train(training)(x)
    for strided in others:
        other = case.build().train(training)(strided.requires_grad_())
        if other.requires_grad:
            other.sum().backward()
        if moves(out, other) and not case.lone.draws:  # in another order
            return f"strides {strided.stride()} change the output"
    return None


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
    case = norm.at(norm.shapes[0] if norm.shapes else (STEPS, norm.num_features))
    module = case.build()
    before = dict(module.named_parameters())
    with suppress(Exception):  # no input may be taken
        module(case.values())
    made = [name for name, p in module.named_parameters() if p is not before.get(name)]
    made = [name for name, p in before.items() if is_lazy(p)] or made
    return f"{made[0]} is made in the forward, too late for an optimizer" if made else None


def holds_no_graph(case: NormCase) -> Reply:
    """Are the tensors that the norm stores, as buffers or attributes, detached?"""
    norm = case.build()
    for seed in range(STEPS):
        norm(case.values(seed=seed).requires_grad_())
    kept = dict(norm.named_buffers())
    for path, module in norm.named_modules():
        kept |= {f"{path}.{name}".lstrip("."): value for name, value in vars(module).items()}
    for name, tensor in kept.items():
        is_kept = isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
        if is_kept and (tensor.requires_grad or tensor.grad_fn is not None):
            return f"{name} keeps the graph of {STEPS} forwards, and memory grows; detach it"
    return None


def averages_as_torch(case: NormCase) -> Reply:
    """Are the running averages those of torch's batch norm?

    One step shows what a buffer with a value per channel averages. A buffer that averages
    something other than moments of the batch is another design, and no fault.
    """
    knobs = {"momentum": MOMENTUM} if "momentum" in arguments_of(case.lone.make) else {}
    spread = torch.linspace(0.5, 2.0, case.shape[1], dtype=torch.float64)
    spread = spread.view(-1, *[1] * (len(case.shape) - 2))
    inputs = [spread * (case.values(torch.float64, seed) + seed) for seed in (1, 2)]
    norm = case.build(torch.float64, **knobs)
    with torch.no_grad():
        norm(inputs[0])
        before = read_state(norm)
        norm(inputs[1])
    rows = inputs[1].transpose(0, 1).flatten(1)
    statistics = {
        "mean": rows.mean(1),
        "unbiased variance": rows.var(1),
        "biased variance": rows.var(1, correction=0),
        "standard deviation": rows.std(1),
    }
    recognized, faults = [], []
    for name, new in read_state(norm).items():
        old = before[name]
        if old.numel() != case.shape[1] or torch.equal(old, new):
            continue
        moved = (new - old).double().flatten()
        for what, statistic in statistics.items():
            way = statistic - old.flatten()
            weight = (moved @ way) / (way @ way)
            if (moved - weight * way).norm() >= EXACT * moved.norm():
                continue
            recognized.append(name)
            if what not in ("mean", "unbiased variance"):
                faults.append(f"{name} averages the {what}, not the unbiased variance")
            if knobs and abs(weight + MOMENTUM - 1) < EXACT:
                faults.append(f"momentum={MOMENTUM} is the weight of the old {name}")
            break
    if faults:
        return "; ".join(faults)
    return None if recognized else skipped("keeps no averages of batch mean or variance")
