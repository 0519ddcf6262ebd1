"""Questions about the rules of a norm: inputs, dtypes, parameters, state, averages, arguments."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normexp.checks.asking import Answer, Reply, measured, show, skipped
from normexp.checks.lone_norm import LADDER, LoneNorm, NormCase, Shape, arguments_of, shape_at
from normexp.checks.probe import COARSE_TOLERANCE, EVERYWHERE, MODES, differ, moves
from normexp.errors import first_line
from normexp.norms.adapt import FEATURE_NAMES, PROBED_DIMS
from normexp.norms.state import read_state

STEPS = 3  # of training

# ---------------------------------------------------------------- inputs


def takes_an_input(norm: LoneNorm) -> Reply:
    """Is any input mapped to its own shape?"""
    if norm.shapes:
        return None
    replies = [takes_dims(num_dims, norm) for num_dims in PROBED_DIMS]
    wrong = [reply for reply in replies if isinstance(reply, str)]
    return wrong[0] if wrong else norm.problem or "every input is refused"


def takes_dims(num_dims: int, norm: LoneNorm) -> Reply:
    """Is the shape of the input kept, in both modes?

    Asks the norm without a wrapper. Another shape is a fault only if no map is taken.
    """
    refusal = ""
    for step in LADDER:
        if len(step) != num_dims - 1:
            continue
        case = norm.at(shape_at(norm.num_features, step))
        x = case.values()
        x = x.movedim(1, -1).contiguous() if norm.layout.channels_last else x
        out, reason = _apply_bare(case, x)
        if out is None:
            refusal = refusal or reason
            continue
        if not isinstance(out, Tensor):
            return f"{show(x.shape)} in, a {type(out).__name__} out"
        if out.shape == x.shape:
            return None
        changed = f"{show(x.shape)} in, {show(out.shape)} out"
        return measured("reshaped", changed) if norm.with_dims(4) else changed
    return measured("refused", refusal)


def _apply_bare(case: NormCase, x: Tensor) -> tuple[object, str]:
    """The output in evaluation, or the first wrong output; or None and the refusal.

    A warning counts as a refusal if the layout excludes these dimensions: torch then reads (N, C)
    as one sample.
    """
    strict = "ignore" if len(case.shape) in case.lone.layout.num_dims else "error"
    out: object = None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter(strict, UserWarning)
        try:
            norm = case.bare()
            for training in MODES:
                out = norm.train(training)(x)
                if not isinstance(out, Tensor) or out.shape != x.shape:
                    break
        except Exception as error:  # of foreign code, any kind
            return None, first_line(error)
    return out, ""


@torch.no_grad()
def finite(case: NormCase, training: bool) -> str | None:
    """Are the outputs of standard normal inputs finite?"""
    out = case.build().train(training)(case.values())
    return "returns NaN" if out.isnan().any() else "returns infinity" if out.isinf().any() else None


# ---------------------------------------------------------------- dtypes and memory


def keeps_dtype(norm: LoneNorm) -> Reply:
    """Does the output have the dtype of the input?"""
    missing, case = [], norm.smallest
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        name = _dtype_name(dtype)
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
                return f"{name} in, {_dtype_name(out.dtype)} out, {show(case.shape)}"
    return Answer(detail=f"this device lacks {', '.join(missing)}" if missing else "")


def computes_in_float64(norm: LoneNorm) -> Reply:
    """Can the norm be computed in float64, where weak dependences show?"""
    if norm.probed_in == torch.float64:
        return None
    least = f"dependences weaker than {COARSE_TOLERANCE:g} of the largest value are not seen"
    return measured("float32 alone", least)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def own_maps(norm: LoneNorm) -> list[Shape]:
    """The maps that the norm takes without a wrapper."""
    return norm.with_dims(4) if 4 in norm.layout.num_dims else []


def keeps_channels_last(case: NormCase) -> Reply:
    """Does a channels_last map stay one?"""
    out = case.build()(case.values().contiguous(memory_format=torch.channels_last))
    keeps = out.is_contiguous(memory_format=torch.channels_last)
    return measured("yes") if keeps else measured("no", f"contiguous out, {show(case.shape)}")


def takes_any_strides(case: NormCase, training: bool) -> str | None:
    """Does an input that is not contiguous give the output of its contiguous copy?

    Norms with random draws are not compared, because draws follow the order in memory.
    """
    x = case.values()
    others = [x.transpose(0, -1).contiguous().transpose(0, -1)]
    if x.ndim == 4:
        others.append(x.contiguous(memory_format=torch.channels_last))
    out = case.build().train(training)(x)
    for strided in others:
        other = case.build().train(training)(strided.requires_grad_())
        if other.requires_grad:
            other.sum().backward()
        if moves(out, other) and not case.lone.draws:
            return f"strides {strided.stride()} change the output"
    return None


@torch.no_grad()
def leaves_input_alone(case: NormCase, training: bool) -> str | None:
    """Does the input hold the same values after the forward?"""
    x = case.values()
    case.build().train(training)(x)
    return None if torch.equal(x, case.values()) else "the input is written in place"


# ---------------------------------------------------------------- parameters and state


def makes_parameters_at_once(norm: LoneNorm) -> Reply:
    """Does __init__ make every parameter, in time for the optimizer?"""
    module = norm.smallest.build()
    before = dict(module.named_parameters())
    lazy = [name for name, parameter in before.items() if is_lazy(parameter)]
    module(norm.smallest.values())
    made = lazy + [name for name, p in module.named_parameters() if p is not before.get(name)]
    return f"{made[0]} is made in the forward, too late for an optimizer" if made else None


def reaches_parameters(case: NormCase) -> str | None:
    """Does one backward reach every parameter?"""
    norm = case.trained(torch.float32)
    parameters = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    if parameters:
        (norm(case.values().requires_grad_()) * case.values(seed=1)).sum().backward()
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    return f"no gradient reaches {', '.join(without)}" if without else None


def holds_no_graph(case: NormCase) -> str | None:
    """Are the tensors that the norm stores, as buffers or attributes, detached?"""
    norm = case.build()
    for seed in range(STEPS):
        norm(case.values(seed=seed).requires_grad_())
    kept: dict[str, Any] = dict(norm.named_buffers())
    for path, module in norm.named_modules():
        kept |= {f"{path}.{name}".lstrip("."): value for name, value in vars(module).items()}
    for name, tensor in kept.items():
        is_kept = isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
        if is_kept and (tensor.requires_grad or tensor.grad_fn is not None):
            return f"{name} keeps the graph of {STEPS} forwards, and memory grows; detach it"
    return None


def keeps_buffers(case: NormCase, training: bool) -> str | None:
    """Do the buffers keep names, shapes and dtypes, as DDP's broadcast needs?"""
    norm = case.build().train(training)
    before = _describe_buffers(norm)
    norm(case.values())
    after = _describe_buffers(norm)
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, "missing"), after.get(name, "missing")
        if was != now:
            return f"buffer {name} was {was}, is {now} after a forward"
    return None


def _describe_buffers(norm: nn.Module) -> dict[str, str]:
    return {n: f"{show(b.shape)} {_dtype_name(b.dtype)}" for n, b in norm.named_buffers()}


@torch.no_grad()
def is_deterministic(case: NormCase) -> str | None:
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


# ---------------------------------------------------------------- running averages

MOMENTUM = 0.3  # far from 1 - MOMENTUM
EXACT = 1e-4  # relative, of an average that follows a statistic
SOUND = ("mean", "unbiased variance")


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
    after, statistics = read_state(norm), _batch_statistics(inputs[1])
    recognized, faults = [], []
    for name, old in before.items():
        if old.numel() != case.shape[1] or torch.equal(old, after[name]):
            continue
        average = _find_average(old.flatten(), after[name].flatten(), statistics)
        if average is None:
            continue
        what, weight = average
        recognized.append(name)
        if what not in SOUND:
            faults.append(f"{name} averages the {what}, not the {SOUND[1]}")
        if knobs and abs(weight + MOMENTUM - 1) < EXACT:
            faults.append(f"momentum={MOMENTUM} is the weight of the old {name}, not of the new")
    if faults:
        return "; ".join(faults)
    return None if recognized else skipped("keeps no averages of batch mean or variance")


def _batch_statistics(x: Tensor) -> dict[str, Tensor]:
    """Moments of each channel of (N, C, *), (C,)."""
    rows = x.transpose(0, 1).flatten(1)
    biased, unbiased = rows.var(1, correction=0), rows.var(1)
    return {
        "mean": rows.mean(1),
        "unbiased variance": unbiased,
        "biased variance": biased,
        "standard deviation": unbiased.sqrt(),
        "biased standard deviation": biased.sqrt(),
    }


def _find_average(
    old: Tensor, new: Tensor, statistics: dict[str, Tensor]
) -> tuple[str, float] | None:
    """The statistic and weight w for which new = (1 - w) old + w statistic; None if none fits."""
    moved = (new - old).double()
    for what, statistic in statistics.items():
        way = statistic - old
        weight = (moved @ way) / (way @ way)
        if (moved - weight * way).norm() < EXACT * moved.norm():
            return what, float(weight)
    return None


def evaluates_by_averages(case: NormCase) -> Reply:
    """Does evaluation ignore other samples, if training keeps averages?"""
    probe = case.probe()
    before, after = read_state(probe.module), probe.observe().state
    moved = [
        n for n, v in after.items() if v.is_floating_point() and not v.equal(before.get(n, v + 1))
    ]
    if not moved:
        return skipped("training moves no buffer")
    if case.probe(False).reads_samples(gradients=False):
        return f"evaluation reads other samples although {moved[0]} is kept"
    return None


# ---------------------------------------------------------------- arguments

# Arguments that set how a norm computes, not its result; and the length of the data's texts.
WITHOUT_EFFECT = ("inplace", "device", "dtype", "num_positions")
NO_ARGUMENT = "no_such_argument"
ARGUMENT_STEPS = 20  # longer than a short warm-up
Knobs = dict[str, Any]


def uses_arguments(norm: LoneNorm) -> Reply:
    """Does every flag and number move a parameter, output, gradient or state, or cause a refusal?

    Each is changed alone, and together with each other one: a momentum matters only if averages
    are kept, a bound only after a warm-up. Unknown names must be refused.
    """
    if _takes_any_name(norm):
        return f"{NO_ARGUMENT}=1 is taken: a misspelt argument would not be noticed"
    if all(_observe_steps(case, {}) is None for case in _two_cases(norm)):
        return skipped("cannot be copied or run in float64")
    defaults = {
        name: argument.default
        for name, argument in arguments_of(norm.make).items()
        if isinstance(argument.default, bool | int | float)
        and name not in (*FEATURE_NAMES, *WITHOUT_EFFECT)
    }
    bases: list[Knobs] = [{}]
    bases += [{name: other} for name, value in defaults.items() for other in _others(value)]
    swallowed = [
        name
        for name, value in defaults.items()
        if not any(_has_effect(norm, name, value, base) for base in bases)
    ]
    if not swallowed:
        return None
    tried = f"{swallowed[0]}={_others(defaults[swallowed[0]])[0]}"
    return f"{', '.join(swallowed)}: another value changes nothing, as {tried}"


def _takes_any_name(norm: LoneNorm) -> bool:
    if not any(p.kind is p.VAR_KEYWORD for p in arguments_of(norm.make).values()):
        return False
    try:
        norm.smallest.bare(**{NO_ARGUMENT: 1})
    except Exception:  # of foreign code, any kind
        return False
    return True


def _two_cases(norm: LoneNorm) -> list[NormCase]:
    return [norm.at(shape) for shape in dict.fromkeys((norm.shapes[0], norm.shapes[-1]))]


def _others(value: bool | int | float) -> list[Any]:
    """Values to try: far enough to show, near enough to be allowed."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (1, 2, 2 * value) if other != value]
    return [other for other in (value / 2, 2 * value, value / 100, 1.0) if other != value]


def _has_effect(norm: LoneNorm, name: str, value: Any, base: Knobs) -> bool:
    if name in base:
        return False
    for case in _two_cases(norm):
        before = _observe_steps(case, base)
        if before is None:
            continue
        for other in _others(value):
            after = _observe_steps(case, {**base, name: other})
            if after is None or differ(before, after, tolerance=0):
                return True
    return False


def _observe_steps(case: NormCase, knobs: Knobs) -> list[Tensor] | None:
    """Everything observable of a norm over a few training steps; None if it refuses."""
    x = partial(case.values, torch.float64)
    try:
        norm = case.build(torch.float64, **knobs)
        seen = [value.detach().clone() for value in norm.state_dict().values()]
        with torch.no_grad():
            for seed in range(ARGUMENT_STEPS):
                # Several sizes, to reach lower and upper bounds.
                seen.append(norm(2 + 4 ** (seed % 3 - 1) * x(seed)))
            seen += read_state(norm).values()
            seen.append(norm.eval()(x(ARGUMENT_STEPS)))
        step = case.probe(True, **knobs).observe(upstream=EVERYWHERE)
    except Exception:  # of foreign code, any kind
        return None
    return [*seen, *step.gradients]
