"""The contract of a norm: a table of checks, and an assertion for users' own tests."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from normexp.checks.integrity import find_unsaved_state
from normexp.checks.probe import Probe, fixed_draws, moves
from normexp.checks.subject import (
    LADDER,
    MODES,
    Answer,
    Check,
    Finding,
    Line,
    Shape,
    Subject,
    arguments_of,
    measured,
    mode_name,
    open_subject,
    relative_change,
    run_checks,
    shape_at,
    show,
    skipped,
    values,
)
from normexp.errors import UserError, first_line
from normexp.norms.adapt import FEATURE_NAMES
from normexp.norms.layout import PROBED_DIMS
from normexp.norms.state import read_state

BUILT = "can be built"
CLOSE = 1e-4  # relative, of float32
STEPS = 3  # of training
DRAWS = "draws random numbers, different ones in each dtype"


def assert_contract(
    factory: Callable[..., Any],
    num_features: int | None = None,
    *,
    eps: float | None = None,
    except_for: Collection[str] = (),
) -> None:
    """Raises AssertionError naming each line of the contract that a norm breaks.

    Args:
        factory: an nn.Module class, a partial of one, or a `NormFactory`; the argument that takes
            the number of features is found by name.
        num_features: channels of the inputs; by default the fewest that suit the norm.
        eps: passed if the signature has one and nothing has set it.
        except_for: names of lines that may fail, as `("exact at mean 1e4",)`.

    Raises:
        UserError: an argument that is not set, something that makes no nn.Module, or a name in
            `except_for` that no line has.
    """
    waived = {except_for} if isinstance(except_for, str) else set(except_for)
    known = [BUILT, *(check.name for check in CONTRACT)]
    for name in sorted(waived.difference(known)):
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UserError(f"except_for: the contract has no line {name!r}; {hint}")
    target = _name_of(factory)
    _, lines = open_and_measure(factory, target=target, eps=eps, num_features=num_features)
    failures = [
        f"  {line.name}: {line.detail}"
        for line in lines
        if line.status == "fail" and line.name not in waived
    ]
    if failures:
        raise AssertionError("\n".join([f"{target} breaks the contract:", *failures]))


def open_and_measure(make: Callable[..., Any], **known: Any) -> tuple[Subject | None, list[Line]]:
    """A norm's subject and every line of its contract; None if its constructor raises.

    The subject has the shapes for which outputs are finite; without any, the other lines are
    skipped.

    Raises:
        UserError: a user's mistake, see `open_subject`.
    """
    try:
        subject = open_subject(make, **known)
    except UserError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, TypeError | UserError):
            raise
        return None, [Line("contract", BUILT, "fail", detail=str(error))]
    lines = [Line("contract", BUILT, "pass"), *run_checks("contract", INPUTS, subject)]
    with fixed_draws(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sound = [shape for shape in subject.shapes if not any(_nan_at(subject, shape))]
    reason = "outputs are not finite" if subject.shapes else "no input is taken"
    subject = replace(subject, shapes=tuple(sound))
    if subject.shapes:
        return subject, lines + run_checks("contract", ON_SHAPES, subject)
    skip = [Check(check.name, check.question, lambda _: skipped(reason)) for check in ON_SHAPES]
    return subject, lines + run_checks("contract", skip, subject)


def _name_of(factory: Callable[..., Any]) -> str:
    """The import path of a class, of a partial's function, or of an object's class."""
    while isinstance(factory, partial):
        factory = factory.func
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}.{named.__qualname__}"


# ---------------------------------------------------------------- inputs


def takes_an_input(subject: Subject) -> Answer:
    if subject.shapes:
        return None
    found = [takes_dims(num_dims, subject) for num_dims in PROBED_DIMS]
    wrong = [answer for answer in found if isinstance(answer, str)]
    return wrong[0] if wrong else subject.problem or "every input is refused"


def takes_dims(num_dims: int, subject: Subject) -> Answer:
    """Tries the bare norm. Another output shape is a fault only if no input keeps its shape."""
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
    wrong = [
        f"returns {what}, {mode_name(training)}, {show(shape)}"
        for shape in subject.shapes
        for training, what in zip(MODES, _nan_at(subject, shape), strict=True)
        if what
    ]
    return wrong[0] if wrong else None


@torch.no_grad()
def _nan_at(subject: Subject, shape: Shape) -> list[str]:
    """NaN, infinity or nothing, in each mode, for standard normal inputs."""
    outs = [subject.norm(shape).train(training)(values(shape)) for training in MODES]
    return ["NaN" if o.isnan().any() else "infinity" if o.isinf().any() else "" for o in outs]


# ---------------------------------------------------------------- dtypes and memory


def keeps_dtype(subject: Subject) -> Answer:
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
    """Norms with random draws are not compared, because draws follow the order in memory."""
    x = values(shape)
    strided = x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    out, other = (subject.norm(shape).train(training)(given) for given in (x, strided))
    if other.requires_grad:
        other.sum().backward()
    if relative_change(out, other) > CLOSE and not subject.draws:
        return f"strides {strided.stride()} change the output"
    return None


def leaves_input_alone(subject: Subject, shape: Shape, training: bool) -> str | None:
    x = values(shape)
    with torch.no_grad():
        subject.norm(shape).train(training)(x)
    return None if torch.equal(x, values(shape)) else "the input is written in place"


# ---------------------------------------------------------------- parameters and state


def makes_parameters_at_once(subject: Subject) -> Answer:
    norm = subject.norm(subject.smallest)
    before = dict(norm.named_parameters())
    lazy = [name for name, parameter in before.items() if is_lazy(parameter)]
    norm(values(subject.smallest))
    made = lazy + [name for name, p in norm.named_parameters() if p is not before.get(name)]
    return f"{made[0]} is made in the forward, too late for an optimizer" if made else None


def reaches_parameters(subject: Subject) -> Answer:
    shape = subject.largest
    norm = subject.trained(shape)
    parameters = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    if parameters:
        (norm(values(shape).requires_grad_()) * values(shape, seed=1)).sum().backward()
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    return f"no gradient reaches {', '.join(without)}, {show(shape)}" if without else None


def holds_no_graph(subject: Subject) -> Answer:
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
    """DDP broadcasts the buffers that exist at the start."""
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


def copies(subject: Subject) -> Answer:
    norm = subject.norm(subject.smallest)
    for moment in ("before", "after"):
        try:
            own = copy.deepcopy(norm)
        except Exception as error:
            return f"deepcopy {moment} a training forward: {type(error).__name__}"
        x = values(subject.smallest, seed=1)
        if moves(_redrawn(norm, x), _redrawn(own, x)):
            return f"a deepcopy made {moment} a training forward gives other outputs"
    return None


def _redrawn(norm: nn.Module, x: Tensor) -> Tensor:
    """The output with the same random draws at every call."""
    torch.default_generator.manual_seed(0)
    return norm(x).detach()


def restores(subject: Subject) -> Answer:
    for shape in subject.shapes:
        norm = subject.norm(shape)
        norm(values(shape))  # lazy parameters have a shape from here on
        fault = find_unsaved_state(subject.norm(shape), (values(shape),), SAVED_STEPS)
        if fault is not None:
            return f"{fault}, {show(shape)}"
    return None


def is_deterministic(subject: Subject, shape: Shape, training: bool) -> str | None:
    norm = subject.trained(shape).train(training)
    with torch.no_grad():
        first, _, again = norm(values(shape)), norm(values(shape, seed=1)), norm(values(shape))
    return "two forwards of one input differ" if relative_change(first, again) > 0 else None


def keeps_state_in_evaluation(subject: Subject) -> Answer:
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
    """Recognizes what a buffer of one value per channel averages, from one step of it.

    A buffer that averages something else than moments of the batch is another design, no fault.
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
    """An effect is another parameter, output, gradient or state, or a refusal.

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
    except Exception:  # of foreign code, any kind
        return None
    trained = Probe(subject.trained(shape, torch.float64, **knobs))
    found = trained.observe(x(0), upstream=torch.ones(1, dtype=torch.bool))
    slopes = [t for t in (found.input_gradient,) if t is not None]
    return [*seen, *slopes, *found.parameter_gradients.values()]


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


# ---------------------------------------------------------------- half precision

SMALL_STEP = 1e-6  # from 1, visible in float32 but not in half precision
HALF_MEAN = 30.0  # squares in bfloat16 then keep no digit of a variance of 1
HALF_TOLERANCE = 0.03  # half precision may round the output, 2^-8 in bfloat16, not the statistics


def keeps_digits_in_half(subject: Subject) -> Answer:
    """Parameters stay in float32, as in mixed precision, if the norm supports that."""
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
# input alone leaves 6e-5 of a deviation of 1 at mean 1e3, and ten times that at 1e4.
TOLERANCES = {1e3: 0.01, 1e4: 0.05}
MOST = 0.75  # of the outputs: a channel whose few values happen to be close keeps few digits
REFUSALS = (RuntimeError, ValueError, AssertionError, IndexError)
CONSTANT = 3.5  # its sums and means are exact, so a variance is 0


def keeps_digits_far_from_zero(mean: float, subject: Subject) -> Answer:
    if subject.draws:
        return skipped(DRAWS)
    for shape in subject.shapes:
        x = mean + values(shape)
        out = subject.norm(shape)(x)
        if not out.isfinite().all():
            return f"not finite, {show(shape)}"
        exact = subject.norm(shape, torch.float64)(x.double()).detach()
        error = ((out - exact).abs() / exact.abs().amax().clamp(min=1e-30)).detach().flatten()
        change = float(error.quantile(MOST))
        if change > TOLERANCES[mean]:
            return f"off by {change:.2g} of the largest output, {show(shape)}"
    return None


def is_finite_on(
    transform: Callable[[Tensor], Tensor], subject: Subject, shape: Shape, training: bool
) -> str | None:
    probe = Probe(subject.trained(shape).train(training))
    found = probe.observe(transform(values(shape)), upstream=torch.ones(1, dtype=torch.bool))
    slopes = [*found.parameter_gradients.values(), found.input_gradient]
    parts = {"output": [found.output], "gradient": slopes, "running state": found.state.values()}
    for name, tensors in parts.items():
        if not all(tensor.isfinite().all() for tensor in tensors if tensor is not None):
            return f"{name} not finite"
    return None


def takes_one_sample(subject: Subject) -> Answer:
    return _on_little([(1, *shape[1:]) for shape in subject.shapes], subject)


def takes_one_position(subject: Subject) -> Answer:
    shapes = {(*shape[:2], *[1] * len(shape[2:])) for shape in subject.shapes if len(shape) > 2}
    return _on_little(sorted(shapes, key=len), subject) if shapes else skipped("takes no positions")


def takes_empty_batch(subject: Subject) -> Answer:
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


# ---------------------------------------------------------------- the table

SAVED_STEPS = 20  # of training, in which state outside of the state_dict may show

INPUTS = (
    Check("an input is taken", "is any input mapped to its own shape?", takes_an_input),
    *(
        Check(f"{n}-D inputs", "is the shape kept, in both modes?", partial(takes_dims, n))
        for n in PROBED_DIMS
    ),
    Check("finite outputs", "are outputs of standard normal inputs finite?", finite),
)
ON_SHAPES = (
    Check("dtype kept", "does the output have the input's dtype?", keeps_dtype),
    Check("channels_last kept", "does a channels_last map stay one?", keeps_channels_last),
    Check("any strides", "is an input taken that is not contiguous?", takes_any_strides, MODES),
    Check("input unchanged", "is the input left as it is?", leaves_input_alone, MODES),
    Check(
        "parameters made at once", "does __init__ make every parameter?", makes_parameters_at_once
    ),
    Check("gradient for every parameter", "does a backward reach all?", reaches_parameters),
    Check("no graph kept", "are stored tensors detached?", holds_no_graph),
    Check("buffers keep shape and dtype", "do forwards keep the buffers?", keeps_buffers, MODES),
    Check("deepcopy", "does a deepcopy give the same outputs?", copies),
    Check("state_dict round trip", "does a norm restored from its state_dict train on?", restores),
    Check(
        "deterministic in evaluation", "does one input have one output?", is_deterministic, (False,)
    ),
    Check(
        "evaluation changes no state", "are buffers kept in evaluation?", keeps_state_in_evaluation
    ),
    Check("running averages", "are they those of torch's batch norm?", averages_as_torch),
    Check(
        "evaluation by averages",
        "does evaluation leave other samples alone, if averages are kept?",
        evaluates_by_averages,
    ),
    Check(
        "statistics wide in bfloat16",
        "do bfloat16 inputs at mean 30 give the outputs of float64, up to rounding?",
        keeps_digits_in_half,
    ),
    *(
        Check(
            f"gradient {mode_name(training)}",
            "does autograd agree with differences, for the input and every parameter?",
            partial(gradient_is_right, training),
        )
        for training in MODES
    ),
    *(
        Check(
            f"exact at mean {name}",
            "does float32 give the outputs of float64, up to rounding?",
            partial(keeps_digits_far_from_zero, float(name)),
        )
        for name in ("1e3", "1e4")
    ),
    *(
        Check(
            f"finite {name}",
            "are outputs, gradients and running state finite?",
            partial(is_finite_on, change),
            MODES,
        )
        for name, change in {
            "on constants": lambda x: 0 * x + CONSTANT,
            "at scale 1e-12": lambda x: 1e-12 * x,
            "at scale 1e12": lambda x: 1e12 * x,
        }.items()
    ),
    Check("one sample", "is one sample refused, or its output finite?", takes_one_sample),
    Check("one position", "is one position refused, or not erased?", takes_one_position),
    Check("empty batch", "is no sample refused, or harmless?", takes_empty_batch),
    Check("no argument swallowed", "has every flag and number an effect?", uses_arguments),
)
CONTRACT = INPUTS + ON_SHAPES
