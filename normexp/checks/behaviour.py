"""Contract: inputs, dtypes, parameters, state, running averages and arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normexp.checks.integrity import find_unsaved_state
from normexp.checks.probe import Probe
from normexp.checks.subject import (
    LADDER,
    MODES,
    Answer,
    Finding,
    Shape,
    Subject,
    arguments_of,
    measured,
    mode_name,
    relative_change,
    shape_at,
    show,
    skipped,
    values,
)
from normexp.errors import first_line
from normexp.norms.adapt import FEATURE_NAMES, PROBED_DIMS
from normexp.norms.state import read_state

CLOSE = 1e-4  # relative, of float32
STEPS = 3  # of training
SAVED_STEPS = 20  # of training, in which state outside of the state_dict may show

# ---------------------------------------------------------------- inputs


def takes_an_input(subject: Subject) -> Answer:
    """Is any input mapped to its own shape?"""
    if subject.shapes:
        return None
    found = [takes_dims(num_dims, subject) for num_dims in PROBED_DIMS]
    wrong = [answer for answer in found if isinstance(answer, str)]
    return wrong[0] if wrong else subject.problem or "every input is refused"


def takes_dims(num_dims: int, subject: Subject) -> Answer:
    """Is the shape of the input kept, in both modes?

    Asks the norm without a wrapper. Another shape is a fault only if no map is taken.
    """
    refusal = ""
    for step in LADDER:
        if len(step) != num_dims - 1:
            continue
        shape = shape_at(subject.num_features, step)
        x = values(shape)
        x = x.movedim(1, -1).contiguous() if subject.layout.channels_last else x
        out, reason = _apply_bare(subject, shape, x)
        if out is None:
            refusal = refusal or reason
            continue
        if not isinstance(out, Tensor):
            return f"{show(tuple(x.shape))} in, a {type(out).__name__} out"
        if out.shape == x.shape:
            return None
        changed = f"{show(tuple(x.shape))} in, {show(tuple(out.shape))} out"
        return measured("reshaped", changed) if subject.with_dims(4) else changed
    return measured("refused", refusal)


def _apply_bare(subject: Subject, shape: Shape, x: Tensor) -> tuple[object, str]:
    """The output in evaluation, or in training if wrong there; or None and the refusal.

    A warning counts as a refusal if the layout excludes these dimensions: torch then reads (N, C)
    as one sample.
    """
    strict = "ignore" if len(shape) in subject.layout.num_dims else "error"
    out: object = None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter(strict, UserWarning)
        try:
            norm = subject.bare(shape)
            for training in MODES:
                out = norm.train(training)(x)
                if not isinstance(out, Tensor) or out.shape != x.shape:
                    break
        except Exception as error:  # of foreign code, any kind
            return None, first_line(error)
    return out, ""


def finite(subject: Subject) -> Answer:
    """Are the outputs of standard normal inputs finite?"""
    wrong = [
        f"returns {what}, {mode_name(training)}, {show(shape)}"
        for shape in subject.shapes
        for training, what in zip(MODES, find_nan(subject, shape), strict=True)
        if what
    ]
    return wrong[0] if wrong else None


@torch.no_grad()
def find_nan(subject: Subject, shape: Shape) -> list[str]:
    """NaN, infinity or nothing, in each mode, for standard normal inputs."""
    outs = [subject.norm(shape).train(training)(values(shape)) for training in MODES]
    return ["NaN" if o.isnan().any() else "infinity" if o.isinf().any() else "" for o in outs]


# ---------------------------------------------------------------- dtypes and memory


def keeps_dtype(subject: Subject) -> Answer:
    """Does the output have the dtype of the input?"""
    missing = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        name = _dtype_name(dtype)
        for training in MODES:
            try:
                norm = subject.norm(subject.smallest, dtype).train(training)
                out = norm(values(subject.smallest, dtype))
            except RuntimeError as error:  # also NotImplementedError
                known = isinstance(error, NotImplementedError) or "not implemented" in str(error)
                if not known:
                    return f"{name} {show(subject.smallest)}: {first_line(error)}"
                missing.append(name)
                break
            if out.dtype != dtype:
                return f"{name} in, {_dtype_name(out.dtype)} out, {show(subject.smallest)}"
    return Finding("pass", detail=f"this device lacks {', '.join(missing)}" if missing else "")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def keeps_channels_last(subject: Subject) -> Answer:
    """Does a channels_last map stay one, with the outputs of a contiguous one?"""
    if not subject.with_dims(4) or 4 not in subject.layout.num_dims:
        return skipped("takes no 4-D input by itself")
    for shape in subject.with_dims(4):
        x = values(shape)
        out = subject.norm(shape)(x)
        last = subject.norm(shape)(x.contiguous(memory_format=torch.channels_last))
        if not last.is_contiguous(memory_format=torch.channels_last):
            return f"channels_last {show(shape)} in, contiguous out"
        if not subject.draws and relative_change(out, last) > CLOSE:
            return f"channels_last {show(shape)} gives other outputs than contiguous"
    return None


def takes_any_strides(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Does an input that is not contiguous give the output of its contiguous copy?

    Norms with random draws are not compared, because draws follow the order in memory.
    """
    x = values(shape)
    strided = x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    out, other = (subject.norm(shape).train(training)(given) for given in (x, strided))
    if other.requires_grad:
        other.sum().backward()
    if relative_change(out, other) > CLOSE and not subject.draws:
        return f"strides {strided.stride()} change the output"
    return None


def leaves_input_alone(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Does the input hold the same values after the forward?"""
    x = values(shape)
    with torch.no_grad():
        subject.norm(shape).train(training)(x)
    return None if torch.equal(x, values(shape)) else "the input is written in place"


# ---------------------------------------------------------------- parameters and state


def makes_parameters_at_once(subject: Subject) -> Answer:
    """Does __init__ make every parameter, in time for the optimizer?"""
    norm = subject.norm(subject.smallest)
    before = dict(norm.named_parameters())
    lazy = [name for name, parameter in before.items() if is_lazy(parameter)]
    norm(values(subject.smallest))
    made = lazy + [name for name, p in norm.named_parameters() if p is not before.get(name)]
    return f"{made[0]} is made in the forward, too late for an optimizer" if made else None


def reaches_parameters(subject: Subject) -> Answer:
    """Does one backward reach every parameter?"""
    shape = subject.largest
    norm = subject.trained(shape)
    parameters = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    if parameters:
        (norm(values(shape).requires_grad_()) * values(shape, seed=1)).sum().backward()
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    return f"no gradient reaches {', '.join(without)}, {show(shape)}" if without else None


def holds_no_graph(subject: Subject) -> Answer:
    """Are the tensors that it stores detached?"""
    norm = subject.norm(subject.smallest)
    for seed in range(STEPS):
        norm(values(subject.smallest, seed=seed).requires_grad_())
    for name, tensor in _kept_tensors(norm):
        if tensor.grad_fn is not None or tensor.requires_grad:
            return (
                f"{name} keeps the graph of {STEPS} forwards, {show(subject.smallest)}: "
                "memory grows with every step; detach it"
            )
    return None


def _kept_tensors(norm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that modules keep as plain attributes."""
    yield from norm.named_buffers()
    for path, module in norm.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                yield f"{path}.{name}".lstrip("."), value


def keeps_buffers(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Do the buffers keep names, shapes and dtypes? DDP broadcasts those of the start."""
    norm = subject.norm(shape).train(training)
    before = _describe_buffers(norm)
    norm(values(shape))
    after = _describe_buffers(norm)
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, "missing"), after.get(name, "missing")
        if was != now:
            return f"buffer {name} was {was}, is {now} after a forward"
    return None


def _describe_buffers(norm: nn.Module) -> dict[str, str]:
    return {n: f"{show(tuple(b.shape))} {_dtype_name(b.dtype)}" for n, b in norm.named_buffers()}


def restores(subject: Subject) -> Answer:
    """Does a norm restored from its state_dict go on as the original?"""
    for shape in subject.shapes:
        norm = subject.norm(shape)
        norm(values(shape))  # lazy parameters have a shape from here on
        fault = find_unsaved_state(subject.norm(shape), (values(shape),), SAVED_STEPS)
        if fault is not None:
            return f"{fault}, {show(shape)}"
    return None


def is_deterministic(subject: Subject, shape: Shape, training: bool) -> str | None:
    """Does one input have one output in evaluation?"""
    norm = subject.trained(shape).train(training)
    with torch.no_grad():
        first, _, again = norm(values(shape)), norm(values(shape, seed=1)), norm(values(shape))
    return "two forwards of one input differ" if relative_change(first, again) > 0 else None


def keeps_state_in_evaluation(subject: Subject) -> Answer:
    """Does evaluation leave the buffers alone?"""
    norm = subject.trained(subject.smallest).eval()
    before = read_state(norm)
    if not before:
        return skipped("has no buffers")
    with torch.no_grad():
        norm(values(subject.smallest))
    after = read_state(norm)
    changed = [n for n, b in before.items() if relative_change(b, after[n]) > 0]
    return f"evaluation changes {changed[0]}, {show(subject.smallest)}" if changed else None


# ---------------------------------------------------------------- running averages

MOMENTUM = 0.3  # far from 1 - MOMENTUM


def averages_as_torch(subject: Subject) -> Answer:
    """Are the running averages those of torch's batch norm?

    Recognizes what a buffer of one value per channel averages, from one step of it. A buffer
    that averages something else than moments of the batch is another design, and no fault.
    """
    knobs = {"momentum": MOMENTUM} if "momentum" in arguments_of(subject.make) else {}
    shape = subject.largest
    spread = torch.linspace(0.5, 2.0, shape[1], dtype=torch.float64)
    inputs = [
        (values(shape, torch.float64, seed) + seed).mul(spread.view(-1, *[1] * (len(shape) - 2)))
        for seed in (1, 2)
    ]
    norm = subject.norm(shape, torch.float64, **knobs)
    with torch.no_grad():
        norm(inputs[0])
        before = read_state(norm)
        norm(inputs[1])
    after, statistics = read_state(norm), _batch_statistics(inputs[1])
    recognized, faults = [], []
    for name, old in before.items():
        if old.numel() != shape[1] or torch.equal(old, after[name]):
            continue
        found = _find_average(old.flatten(), after[name].flatten(), statistics)
        if found is None:
            continue
        what, weight = found
        recognized.append(name)
        if what not in SOUND:
            faults.append(f"{name} averages the {what}, not the {SOUND[1]}")
        if knobs and abs(weight - MOMENTUM) > CLOSE and abs(weight + MOMENTUM - 1) < CLOSE:
            faults.append(f"momentum={MOMENTUM} is the weight of the old {name}, not of the new")
    if faults:
        return f"{'; '.join(faults)}, {show(shape)}"
    return None if recognized else skipped("keeps no averages of batch mean or variance")


SOUND = ("mean", "unbiased variance")


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
    """The statistic and its weight w with new = (1 - w) old + w statistic."""
    moved = (new - old).double()
    for what, statistic in statistics.items():
        way = statistic - old
        weight = (moved @ way) / (way @ way)
        if (moved - weight * way).norm() < CLOSE * moved.norm():
            return what, float(weight)
    return None


def evaluates_by_averages(subject: Subject) -> Answer:
    """Does evaluation read no other sample, if training keeps averages?"""
    for shape in subject.shapes:
        norm = subject.trained(shape, torch.float64)
        before = read_state(norm)
        norm(values(shape, torch.float64))
        after = read_state(norm).items()
        moved = [n for n, v in after if v.is_floating_point() and not v.equal(before.get(n, v + 1))]
        if not moved:
            return skipped("training moves no buffer")
        probe = Probe(norm.eval())
        if probe.reads_samples(values(shape, torch.float64), training=False):
            return f"evaluation reads other samples although {moved[0]} is kept, {show(shape)}"
    return None


# ---------------------------------------------------------------- arguments

# Arguments that set how a norm computes, not its result; and the length of the data's texts.
WITHOUT_EFFECT = ("inplace", "device", "dtype", "num_positions")
NO_ARGUMENT = "no_such_argument"
ARGUMENT_STEPS = 20  # longer than a short warm-up
Knobs = dict[str, Any]


def uses_arguments(subject: Subject) -> Answer:
    """Has every flag and number an effect: on a parameter, output, gradient or state, or a refusal?

    Each flag and number is changed alone, and together with each other one: a momentum matters
    only if averages are kept, a bound only after a warm-up. Unknown names must be refused.
    """
    if _takes_any_name(subject):
        return f"{NO_ARGUMENT}=1 is taken: a misspelt argument would not be noticed"
    if all(_observe_steps(subject, shape, {}) is None for shape in _two_shapes(subject)):
        return skipped("cannot be copied or run in float64")
    defaults = {
        name: argument.default
        for name, argument in arguments_of(subject.make).items()
        if isinstance(argument.default, bool | int | float)
        and name not in (*FEATURE_NAMES, *WITHOUT_EFFECT)
    }
    bases: list[Knobs] = [{}]
    bases += [{name: other} for name, value in defaults.items() for other in _others(value)]
    swallowed = [
        name
        for name, value in defaults.items()
        if not any(_has_effect(subject, name, value, base) for base in bases)
    ]
    if not swallowed:
        return None
    tried = f"{swallowed[0]}={_others(defaults[swallowed[0]])[0]}"
    return f"{', '.join(swallowed)}: another value changes nothing, as {tried}"


def _takes_any_name(subject: Subject) -> bool:
    if not any(p.kind is p.VAR_KEYWORD for p in arguments_of(subject.make).values()):
        return False
    try:
        subject.bare(subject.smallest, **{NO_ARGUMENT: 1})
    except Exception:  # of foreign code, any kind
        return False
    return True


def _two_shapes(subject: Subject) -> list[Shape]:
    return list(dict.fromkeys((subject.smallest, subject.largest)))


def _others(value: bool | int | float) -> list[Any]:
    """Values to try: far enough to show, near enough to be allowed."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (1, 2, 2 * value) if other != value]
    return [other for other in (value / 2, 2 * value, value / 100, 1.0) if other != value]


def _has_effect(subject: Subject, name: str, value: Any, base: Knobs) -> bool:
    if name in base:
        return False
    for shape in _two_shapes(subject):
        before = _observe_steps(subject, shape, base)
        if before is None:
            continue
        for other in _others(value):
            after = _observe_steps(subject, shape, {**base, name: other})
            if after is None or not _equal(before, after):
                return True
    return False


def _observe_steps(subject: Subject, shape: Shape, knobs: Knobs) -> list[Tensor] | None:
    """Everything observable of a norm over a few training steps; None if it refuses."""
    x = partial(values, shape, torch.float64)
    try:
        norm = subject.norm(shape, torch.float64, **knobs)
        seen = [value.detach().clone() for value in norm.state_dict().values()]
        with torch.no_grad():
            for seed in range(ARGUMENT_STEPS):
                # Several sizes, to reach lower and upper bounds.
                seen.append(norm(2 + 4 ** (seed % 3 - 1) * x(seed)))
            seen += read_state(norm).values()
            seen.append(norm.eval()(x(ARGUMENT_STEPS)))
        trained = Probe(subject.trained(shape, torch.float64, **knobs))
        found = trained.observe(x(0), upstream=torch.ones(1, dtype=torch.bool))
    except Exception:  # of foreign code, any kind
        return None
    slopes = [t for t in (found.input_gradient,) if t is not None]
    return [*seen, *slopes, *found.parameter_gradients.values()]


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))
