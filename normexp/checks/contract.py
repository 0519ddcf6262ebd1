"""The contract of a norm: a table of short checks, and an assertion for users' own tests."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normexp.checks.numerics import NUMERICS
from normexp.checks.probe import Probe, moves
from normexp.checks.subject import (
    LADDER,
    MODES,
    PASSED,
    Checks,
    Finding,
    Line,
    Shape,
    Subject,
    arguments_of,
    failed,
    measured,
    mode_name,
    on_every_input,
    open_subject,
    present,
    relative_change,
    run_checks,
    shape_at,
    show,
    skipped,
    values,
)
from normexp.errors import UserError, first_line
from normexp.norms.adapt import FEATURE_NAMES
from normexp.norms.layout import PROBED_DIMS, unlike_attributes
from normexp.norms.state import read_state

BUILT = "can be built"
CLOSE = 1e-4  # relative, of float32
STEPS = 3  # of training


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
    known = [BUILT, *SHAPES, *ON_SHAPES]
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
    lines = [Line("contract", BUILT, "pass"), *run_checks("contract", SHAPES, subject)]
    if subject.shapes:
        return subject, lines + run_checks("contract", ON_SHAPES, subject)
    rest = [Line("contract", name, "skipped", detail="no input is taken") for name in ON_SHAPES]
    return subject, lines + rest


def _name_of(factory: Callable[..., Any]) -> str:
    """The import path of a class, of a partial's function, or of an object's class."""
    while isinstance(factory, partial):
        factory = factory.func
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}.{named.__qualname__}"


# ---------------------------------------------------------------- shapes


def takes_dims(num_dims: int, subject: Subject) -> Finding:
    """The bare norm keeps or refuses a shape, in training and in evaluation."""
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
        elif not isinstance(out, Tensor):
            return failed(f"{show(tuple(x.shape))} in, a {type(out).__name__} out")
        elif out.shape != x.shape:
            return failed(f"{show(tuple(x.shape))} in, {show(tuple(out.shape))} out")
        else:
            return PASSED
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


def takes_some_input(subject: Subject) -> Finding:
    """At least one shape is mapped to itself."""
    if subject.shapes:
        return PASSED
    found = [takes_dims(num_dims, subject) for num_dims in PROBED_DIMS]
    shown = [finding.detail for finding in found if finding.status == "fail"]
    if shown:
        return failed(f"the shape of every input changes or is refused, as {shown[0]}")
    return failed(f"every input is refused: {found[0].detail}")


# ---------------------------------------------------------------- dtypes and memory


def keeps_dtype(subject: Subject) -> Finding:
    """The norm returns its input's dtype, for each dtype."""
    missing = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        name = _dtype_name(dtype)
        for training in MODES:
            try:
                out = subject.norm(subject.smallest, dtype).train(training)(
                    values(subject.smallest, dtype)
                )
            except RuntimeError as error:  # also NotImplementedError
                known = isinstance(error, NotImplementedError) or "not implemented" in str(error)
                if not known:
                    return failed(f"{name} {show(subject.smallest)}: {first_line(error)}")
                missing.append(name)
                break
            if out.dtype != dtype:
                return failed(f"{name} in, {_dtype_name(out.dtype)} out, {show(subject.smallest)}")
    return Finding("pass", detail=f"this device lacks {', '.join(missing)}" if missing else "")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def keeps_channels_last(subject: Subject) -> Finding:
    """A channels_last map comes back as one, with the outputs of a contiguous one."""
    if not subject.with_dims(4) or 4 not in subject.layout.num_dims:
        return skipped("takes no 4-D input by itself")
    draws = subject.draws
    for shape in subject.with_dims(4):
        x = values(shape)
        out = subject.norm(shape)(x)
        last = subject.norm(shape)(x.contiguous(memory_format=torch.channels_last))
        if not last.is_contiguous(memory_format=torch.channels_last):
            return failed(f"channels_last {show(shape)} in, contiguous out")
        if not draws and relative_change(out, last) > CLOSE:
            return failed(f"channels_last {show(shape)} gives other outputs than contiguous")
    return PASSED


def takes_any_strides(subject: Subject, shape: Shape, training: bool) -> str | None:
    """An input that is not contiguous gives the output of its contiguous copy, and a gradient.

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
    """The input holds the same values after the forward as before."""
    x = values(shape)
    with torch.no_grad():
        subject.norm(shape).train(training)(x)
    return None if torch.equal(x, values(shape)) else "the input is written in place"


# ---------------------------------------------------------------- parameters and state


def makes_parameters_at_once(subject: Subject) -> Finding:
    """Every parameter exists before the first forward, so that an optimizer holds it."""
    norm = subject.norm(subject.smallest)
    before = dict(norm.named_parameters())
    lazy = [name for name, parameter in before.items() if is_lazy(parameter)]
    norm(values(subject.smallest))
    made = lazy + [name for name, p in norm.named_parameters() if p is not before.get(name)]
    if made:
        return failed(f"{made[0]} is made in the forward, too late for an optimizer")
    return PASSED


def reaches_parameters(subject: Subject) -> Finding:
    """One backward gives every parameter a gradient."""
    shape = subject.largest
    norm = subject.trained(shape)
    parameters = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    if parameters:
        (norm(values(shape).requires_grad_()) * values(shape, seed=1)).sum().backward()
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    if without:
        return failed(f"no gradient reaches {', '.join(without)}, {show(shape)}")
    return PASSED


def holds_no_graph(subject: Subject) -> Finding:
    """After training steps, no tensor stored in the norm is part of a graph."""
    norm = subject.norm(subject.smallest)
    for seed in range(STEPS):
        norm(values(subject.smallest, seed=seed).requires_grad_())
    for name, tensor in _kept_tensors(norm):
        if tensor.grad_fn is not None or tensor.requires_grad:
            return failed(
                f"{name} keeps the graph of {STEPS} forwards, {show(subject.smallest)}: "
                "memory grows with every step; detach it"
            )
    return PASSED


def _kept_tensors(norm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that modules keep as plain attributes."""
    yield from norm.named_buffers()
    for path, module in norm.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                yield f"{path}.{name}".lstrip("."), value


def keeps_buffers(subject: Subject, shape: Shape, training: bool) -> str | None:
    """A forward changes no buffer's name, shape or dtype: DDP broadcasts the initial buffers."""
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


def copies(subject: Subject) -> Finding:
    """deepcopy works before and after a training step, and the copy gives the same outputs."""
    norm = subject.norm(subject.smallest)
    for moment in ("before", "after"):
        try:
            own = copy.deepcopy(norm)
        except Exception as error:
            return failed(f"deepcopy {moment} a training forward: {type(error).__name__}")
        x = values(subject.smallest, seed=1)
        if moves(_redrawn(norm, x), _redrawn(own, x)):
            return failed(f"a deepcopy made {moment} a training forward gives other outputs")
    return PASSED


def _redrawn(norm: nn.Module, x: Tensor) -> Tensor:
    """The output with the same random draws at every call."""
    torch.default_generator.manual_seed(0)
    return norm(x).detach()


def restores(subject: Subject) -> Finding:
    """A fresh norm with a trained norm's state_dict evaluates and trains on identically."""
    for shape in subject.shapes:
        norm = subject.norm(shape)
        norm(values(shape))  # lazy parameters have a shape from here on
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
            for seed in range(STEPS):
                norm(1 + 2 * values(shape, seed=seed))
        fresh = subject.norm(shape)
        fresh.load_state_dict(norm.state_dict())
        kept = [f": {name} is not a buffer" for name in unlike_attributes(norm, fresh)]
        for training in (False, True, False):
            x = values(shape, seed=STEPS)
            outs = [_redrawn(own.train(training), x) for own in (norm, fresh)]
            if relative_change(*outs) > 1e-5:
                why = "".join(kept[:1])
                mode = mode_name(training)
                return failed(f"other outputs {mode} after load_state_dict, {show(shape)}{why}")
    return PASSED


def is_deterministic(subject: Subject, shape: Shape, training: bool) -> str | None:
    """In evaluation, repeated forwards of one input give the same output."""
    norm = subject.trained(shape).train(training)
    with torch.no_grad():
        first, _, again = norm(values(shape)), norm(values(shape, seed=1)), norm(values(shape))
    return "two forwards differ" if relative_change(first, again) > 0 else None


def keeps_state_in_evaluation(subject: Subject) -> Finding:
    """Evaluation changes no buffer."""
    norm = subject.trained(subject.smallest).eval()
    before = read_state(norm)
    if not before:
        return skipped("has no buffers")
    with torch.no_grad():
        norm(values(subject.smallest))
    after = read_state(norm)
    changed = [n for n, b in before.items() if relative_change(b.double(), after[n].double()) > 0]
    if changed:
        return failed(f"evaluation changes {changed[0]}, {show(subject.smallest)}")
    return PASSED


# ---------------------------------------------------------------- arguments

# Arguments that set how a norm computes, not its result; and the length of the data's texts.
WITHOUT_EFFECT = ("inplace", "device", "dtype", "num_positions")
NO_ARGUMENT = "no_such_argument"
ARGUMENT_STEPS = 20  # longer than a short warm-up
Knobs = dict[str, Any]


def uses_arguments(subject: Subject) -> Finding:
    """Each flag and number has an effect: on parameters, outputs, state, or by a refusal.

    Each is changed alone, and together with each other one: a momentum matters only if averages are
    kept, a bound only after a warm-up. Unknown argument names must be refused.
    """
    if _takes_any_name(subject):
        return failed(f"{NO_ARGUMENT}=1 is taken: a misspelt argument would not be noticed")
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
    if swallowed:
        tried = f"{swallowed[0]}={_others(defaults[swallowed[0]])[0]}"
        return failed(f"{', '.join(swallowed)}: another value changes nothing, as {tried}")
    return PASSED


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
    return [*seen, *present(found.input_gradient), *found.parameter_gradients.values()]


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


SHAPES: Checks = {
    "an input is taken": takes_some_input,
    **{f"{num_dims}-D inputs": partial(takes_dims, num_dims) for num_dims in PROBED_DIMS},
}
ON_SHAPES: Checks = {
    "dtype kept": keeps_dtype,
    "channels_last kept": keeps_channels_last,
    "any strides": on_every_input(takes_any_strides),
    "input unchanged": on_every_input(leaves_input_alone),
    "parameters made at once": makes_parameters_at_once,
    "gradient for every parameter": reaches_parameters,
    "no graph kept": holds_no_graph,
    "buffers keep shape and dtype": on_every_input(keeps_buffers),
    "deepcopy": copies,
    "state_dict round trip": restores,
    "deterministic in evaluation": on_every_input(is_deterministic, modes=(False,)),
    "evaluation changes no state": keeps_state_in_evaluation,
    **NUMERICS,
    "no argument swallowed": uses_arguments,
}
