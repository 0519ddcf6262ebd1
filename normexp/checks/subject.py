"""A norm under examination: how to build it, the inputs it takes, and how a check asks about it."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.checks.probe import (
    MODES,
    Probe,
    after_many_steps,
    changes,
    fixed_draws,
    moves,
    normal,
)
from normexp.errors import UserError, first_line
from normexp.norms.adapt import EPS_NAMES, PROBED_DIMS, Layout, adapt, bind_eps, find_layout
from normexp.norms.slots import Slots

Shape = tuple[int, ...]
Value = str | float | int
# Samples and positions of the inputs, the smallest first; channels come between.
LADDER = ((2,), (5,), (2, 3), (2, 2, 3), (4, 5), (2, 2, 2, 3), (4, 4, 6))
# Numbers of channels to try: a norm may divide them into as many as 32 groups.
FEATURES = (8, 16, 32, 64, 128)
SMALL_STEP = 1e-6  # from 1, visible in float32 but not in half precision
RESPONDING = 0.25  # of the outputs; an activation may clamp half of them


@dataclass(frozen=True)
class Subject:
    """A norm that checks can build repeatedly.

    Attributes:
        target: its import path, for messages.
        make: a class or partial that returns an nn.Module, with the user's knobs bound.
        eps: passed if the signature has such an argument and the user has not set it.
        shapes: the inputs (N, C, *) of LADDER that it maps to the same shape, smallest first.
        slots: the slots that its YAML sets.
        problem: why no layout fits; "" if one does.
    """

    target: str
    make: Callable[..., Any]
    eps: float | None
    num_features: int
    layout: Layout = Layout(channels_last=False, num_dims=PROBED_DIMS)
    shapes: tuple[Shape, ...] = ()
    slots: Slots = Slots()
    problem: str = ""

    @property
    def smallest(self) -> Shape:
        return self.shapes[0]

    @property
    def largest(self) -> Shape:
        return self.shapes[-1]

    def with_dims(self, *num_dims: int) -> list[Shape]:
        return [shape for shape in self.shapes if len(shape) in num_dims]

    def bare(self, shape: Shape, **knobs: Any) -> nn.Module:
        """The norm without a wrapper, for inputs of one shape (N, C, *)."""
        _, num_features, *positions = shape
        make = self.make
        needed = arguments_of(make).get("num_positions")
        if needed is not None and needed.default is needed.empty:
            make = partial(make, num_positions=positions[-1] if positions else 1)
        make = partial(make, **knobs) if knobs else make
        return adapt(make, target=self.target, eps=self.eps)(num_features)

    def norm(self, shape: Shape, dtype: torch.dtype = torch.float32, **knobs: Any) -> nn.Module:
        """The norm as (N, C, *) -> (N, C, *), in training mode and with its first values.

        It draws the same random numbers each time, here and in the forwards that follow.
        """
        torch.default_generator.manual_seed(0)
        return self.layout.present(self.bare(shape, **knobs)).to(dtype).train()

    def trained(self, shape: Shape, dtype: torch.dtype = torch.float64, **knobs: Any) -> nn.Module:
        """The norm after two training forwards; see `_fill_hiding_zeros` for zeros."""
        norm = self.norm(shape, dtype, **knobs)
        with torch.no_grad():
            _fill_hiding_zeros(norm, values(shape, dtype))
            for seed in (1, 2):
                norm(0.5 + 1.5 * values(shape, dtype, seed))
        return norm

    def probe(self, shape: Shape, training: bool = True, **knobs: Any) -> Probe:
        """A probe of the trained norm in float64."""
        return Probe(self.trained(shape, **knobs).train(training))

    def stages(self, shape: Shape, training: bool) -> Iterator[Probe]:
        """Probes of the trained norm and, if it counts steps, of the norm after many of them."""
        yield self.probe(shape, training)
        late = after_many_steps(self.trained(shape), values(shape, torch.float64))
        if late is not None:
            yield Probe(late.train(training))

    @cached_property
    def draws(self) -> bool:
        """True if a training forward uses torch's global random state, as dropout does."""
        return Probe(self.norm(self.smallest)).observe(values(self.smallest)).drew

    @cached_property
    def computes_in_half(self) -> bool:
        """True if a small step of a float64 input moves almost no output that a large one moves."""
        x, direction = (values(self.largest, torch.float64, seed) for seed in (0, 1))
        probe = self.probe(self.largest)
        outs = [probe.observe(x + step * direction).output for step in (0.0, SMALL_STEP, 1.0)]
        small, large = (int((out != outs[0]).sum()) for out in outs[1:])
        return small < 0.1 * large

    @property
    def takes(self) -> str:
        """The inputs that the norm accepts without a wrapper, in words."""
        own = [n for n in self.layout.num_dims if self.with_dims(n)]
        return str(replace(self.layout, num_dims=tuple(own))) if own else "no input"

    @property
    def eps_name(self) -> str | None:
        """The argument that takes eps; None if there is none."""
        return next((name for name in EPS_NAMES if name in arguments_of(self.make)), None)

    @property
    def eps_value(self) -> float | None:
        """The value of eps: the user's, or else `self.eps`; None if the norm has no eps."""
        if self.eps_name is None:
            return None
        argument = arguments_of(bind_eps(self.make, self.eps))[self.eps_name]
        return None if argument.default in (None, argument.empty) else float(argument.default)


@torch.no_grad()
def _fill_hiding_zeros(norm: nn.Module, x: Tensor) -> None:
    """Sets parameters that are all zero to one where zeros hide how outputs depend on inputs.

    A bias hides nothing, because it moves the outputs of two inputs alike; it stays zero.
    """

    def contrast() -> Tensor:
        probe = Probe(norm)
        return probe.observe(3 * x.flip(0) + 1).output - probe.observe(x).output

    for parameter in norm.parameters():
        if not parameter.any():
            before = contrast()
            parameter.fill_(1)
            if not (before.isfinite().all() and moves(before, contrast())):
                parameter.zero_()


def arguments_of(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The signature, with bound knobs as defaults; nothing for a function written in C."""
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}


def values(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Fixed standard normal numbers, the same in every dtype."""
    return normal(shape, seed).to(dtype)


def shape_at(num_features: int, step: Shape) -> Shape:
    """(N, C, *) of a step of the ladder."""
    return (step[0], num_features, *step[1:])


# ---------------------------------------------------------------- opening


def open_subject(
    make: Callable[..., Any],
    *,
    target: str,
    eps: float | None = None,
    num_features: int | None = None,
    slots: Slots | None = None,
) -> Subject:
    """Finds the layout, the number of channels and the inputs that a norm takes.

    Args:
        num_features: channels; by default the fewest at which the norm accepts most inputs,
            responds to small steps of most, and pools channels if it does at any number of
            channels (a group of one or two may not).
        slots: the slots that the norm's YAML sets.

    Raises:
        UserError: not callable, an unknown knob, an argument that is not set, no nn.Module; with
            the constructor's own error as its cause if that raised.
    """
    found: list[Subject] = []
    refusals: list[UserError] = []
    for channels in FEATURES if num_features is None else (num_features,):
        try:
            with fixed_draws():
                subject = _find_layout(Subject(target, make, eps, channels, slots=slots or Slots()))
        except UserError as error:
            refusals.append(error)
            continue
        shapes = (shape_at(channels, step) for step in LADDER)
        shapes = tuple(shape for shape in shapes if accepts(subject, shape))
        found.append(replace(subject, shapes=shapes))
    if not found:
        raise refusals[0]
    return max(found, key=_measurability)  # the first of equals


def _find_layout(bare: Subject) -> Subject:
    """Sets the layout; channels first for shipped norms and if no layout can be determined."""
    shape = shape_at(bare.num_features, LADDER[-1])
    bare.bare(shape)  # refused here, as it would be later
    if bare.target.startswith("normexp.norms."):
        return bare
    try:
        build = lambda num_features: bare.bare(shape_at(num_features, LADDER[-1]))  # noqa: E731
        return replace(bare, layout=find_layout(build, bare.num_features, target=bare.target))
    except UserError as error:
        return replace(bare, problem=str(error).removeprefix(f"norm._target_={bare.target} "))


def _measurability(subject: Subject) -> tuple[int, int, bool]:
    """How much of a norm's behaviour shows at this number of channels; tuples compare."""
    responding = sum(_responds(subject, shape) for shape in subject.shapes)
    pools = any(_pools_channels(subject, shape) for shape in largest(subject))
    return len(subject.shapes), responding, pools


Question = Callable[[Subject, Shape], bool]


def _false_if_it_raises(question: Question) -> Question:
    """Answers false if foreign code raises; the lines of the card then name the exception."""

    @wraps(question)
    def ask(subject: Subject, shape: Shape) -> bool:
        with fixed_draws(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return question(subject, shape)
            except Exception:
                return False

    return ask


@_false_if_it_raises
def accepts(subject: Subject, shape: Shape) -> bool:
    """True if the norm maps inputs of this shape to the same shape, in both modes."""
    norm, x = subject.norm(shape), values(shape)
    return all(norm.train(mode)(x).shape == shape for mode in MODES)


@_false_if_it_raises
def _responds(subject: Subject, shape: Shape) -> bool:
    """True if a small step of the input moves many training outputs."""
    x, step = values(shape), 0.1 * values(shape, seed=1)
    outs = [subject.trained(shape, torch.float32)(given) for given in (x, x + step)]
    return float((changes(*outs, scale=0.01) > 1e-3).double().mean()) > RESPONDING


@_false_if_it_raises
def _pools_channels(subject: Subject, shape: Shape) -> bool:
    probe = Probe(subject.trained(shape, torch.float32))
    return probe.reads_across(values(shape), 1) is not None


# ---------------------------------------------------------------- lines of a card

NO_INPUT = "no input that the norm takes can show this"


@dataclass(frozen=True)
class Line:
    """A line of a card; its check fills in section, name and question.

    Attributes:
        value: the measurement, if the status is `value`.
        detail: the smallest input that shows the result, or the reason.
    """

    section: str = ""
    name: str = ""
    status: Literal["pass", "fail", "value", "skipped"] = "pass"
    value: Value | None = None
    detail: str = ""
    question: str = ""


def failed(detail: str) -> Line:
    return Line(status="fail", detail=detail)


def measured(value: Value, detail: str = "") -> Line:
    return Line(status="value", value=value, detail=detail)


def skipped(reason: str) -> Line:
    return Line(status="skipped", detail=reason)


Answer = Line | str | None  # a string is a fault; None: nothing is wrong


@dataclass(frozen=True)
class Check:
    """A question about a norm, asked once or for each of several inputs.

    Attributes:
        name: of the line on the card.
        find: takes the subject; with `shapes` also a shape; with `modes` also a mode, true for
            training. The first line of its docstring is the question.
        shapes: the inputs (N, C, *) to ask about. The answer is the first fault, else the first
            line returned.
    """

    name: str
    find: Callable[..., Answer]
    shapes: Callable[[Subject], Sequence[Shape]] | None = None
    modes: tuple[bool, ...] = ()

    def line(self, section: str, found: Line) -> Line:
        function = self.find.func if isinstance(self.find, partial) else self.find
        question = (function.__doc__ or "").partition("\n")[0]
        return replace(found, section=section, name=self.name, question=question)

    def __call__(self, subject: Subject) -> Line:
        if self.shapes is None:
            answer = self.find(subject)
            return failed(answer) if isinstance(answer, str) else answer or Line()
        shapes, line = self.shapes(subject), None
        modes = [(training,) for training in self.modes] or [()]
        for shape, mode in itertools.product(shapes, modes):
            answer = self.find(subject, shape, *mode)
            if isinstance(answer, str):
                return failed(", ".join([answer, *map(mode_name, mode), show(shape)]))
            line = line or answer
        return line or (Line() if shapes else skipped(NO_INPUT))


@dataclass(frozen=True)
class Trait(Check):
    """A property of a norm: `find(subject, shape, training)` names what moves, if anything does.

    Attributes:
        shapes: the detail of the line is the first of them where something moves.
        invariance: if true, the line says in which modes nothing moves, else where something does.
    """

    invariance: bool = False

    def __call__(self, subject: Subject) -> Line:
        assert self.shapes is not None
        shapes = self.shapes(subject)
        if not shapes:
            return skipped(NO_INPUT)
        shown: dict[bool, str] = {}
        for training in MODES:
            for shape in shapes:
                moved = self.find(subject, shape, training)
                if isinstance(moved, Line):
                    return moved
                if moved:
                    shown[training] = self._describe(moved, shape, training)
                    break
        modes = [mode for mode in MODES if (mode in shown) is not self.invariance]
        value = mode_name(modes[0]) if len(modes) == 1 else "yes" if modes else "no"
        return measured(value, next(iter(shown.values()), ""))

    def _describe(self, moved: str, shape: Shape, training: bool) -> str:
        if self.invariance:
            return f"it moves the {moved} {mode_name(training)}, {show(shape)}"
        return show(shape) if moved == "output" else f"{show(shape)}, {moved}"


def every(subject: Subject) -> Sequence[Shape]:
    return subject.shapes


def smallest(subject: Subject) -> Sequence[Shape]:
    return subject.shapes[:1]


def largest(subject: Subject) -> Sequence[Shape]:
    return subject.shapes[-1:]


def run_checks(section: str, checks: Sequence[Check], subject: Subject) -> list[Line]:
    """Runs checks one by one: an exception is a failure of its own check.

    Every check starts from the same random state, and leaves the caller's as it was.
    """
    lines = []
    for check in checks:
        with fixed_draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                line = check(subject)
            except Exception as error:  # of foreign code, any kind
                line = failed(f"{type(error).__name__}: {first_line(error)}")
        lines.append(check.line(section, line))
    return lines


def show(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def mode_name(training: bool) -> str:
    return "in training" if training else "in evaluation"
