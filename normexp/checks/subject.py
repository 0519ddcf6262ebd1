"""A norm under examination: how to build it, the inputs it takes, and how a check asks about it."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.checks.probe import Probe, fixed_draws, moved_places, moves, normal
from normexp.errors import UserError, first_line
from normexp.norms.adapt import EPS_NAMES, PROBED_DIMS, Layout, adapt, bind_eps, find_layout
from normexp.norms.slots import Slots

Shape = tuple[int, ...]
Value = str | float | int
# Samples and positions of the inputs, the smallest first; channels come between.
LADDER = ((2,), (5,), (2, 3), (2, 2, 3), (4, 5), (2, 2, 2, 3), (4, 4, 6))
# Numbers of channels to try: a norm may divide them into as many as 32 groups.
FEATURES = (8, 16, 32, 64, 128)
MODES = (True, False)
RESPONDING = 0.25  # of the outputs; an activation may clamp half of them


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        value: the measurement, if the status is `value`.
        detail: the smallest input that shows the result, or the reason.
    """

    status: Literal["pass", "fail", "value", "skipped"]
    value: Value | None = None
    detail: str = ""


@dataclass(frozen=True)
class Line:
    """A finding with its section and name on the card, and what was asked."""

    section: Literal["contract", "traits", "compatibility", "cost"]
    name: str
    status: Literal["pass", "fail", "value", "skipped"]
    value: Value | None = None
    detail: str = ""
    question: str = ""


def measured(value: Value, detail: str = "") -> Finding:
    return Finding("value", value, detail)


def skipped(reason: str) -> Finding:
    return Finding("skipped", detail=reason)


# What a check returns: None if nothing is wrong, the fault, or another finding.
Answer = Finding | str | None


@dataclass(frozen=True)
class Check:
    """A line of the card: its name, and the function that finds the answer.

    Attributes:
        find: of the subject; with `modes`, of the subject, each shape and each of these modes, up
            to the first answer that is not None. Its docstring begins with the question.
        modes: training (true) or evaluation.
    """

    name: str
    find: Callable[..., Answer]
    modes: tuple[bool, ...] = ()

    @property
    def question(self) -> str:
        function = self.find.func if isinstance(self.find, partial) else self.find
        return (function.__doc__ or "").partition("\n")[0]

    def __call__(self, subject: Subject) -> Finding:
        answer = self._ask(subject)
        if answer is None:
            return Finding("pass")
        return Finding("fail", detail=answer) if isinstance(answer, str) else answer

    def _ask(self, subject: Subject) -> Answer:
        if not self.modes:
            return self.find(subject)
        for shape in subject.shapes:
            for training in self.modes:
                answer = self.find(subject, shape, training)
                if isinstance(answer, str):
                    return f"{answer}, {mode_name(training)}, {show(shape)}"
                if answer is not None:
                    return answer
        return None


@dataclass(frozen=True)
class Subject:
    """A norm that checks can build repeatedly.

    Attributes:
        target: its import path, for messages.
        make: a class or partial that returns an nn.Module, with the user's knobs bound.
        eps: passed if the signature has such an argument and the user has not set it.
        shapes: the inputs (N, C, *) of LADDER that it maps to the same shape.
        slots: the slots that its YAML sets.
        problem: why no layout fits.
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

    def with_dims(self, num_dims: int) -> list[Shape]:
        return [shape for shape in self.shapes if len(shape) == num_dims]

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

    def trained(self, shape: Shape, dtype: torch.dtype = torch.float32, **knobs: Any) -> nn.Module:
        """The norm after two training forwards; see `_wake` for zeros."""
        norm = self.norm(shape, dtype, **knobs)
        with torch.no_grad():
            _wake(norm, values(shape, dtype))
            for seed in (1, 2):
                norm(0.5 + 1.5 * values(shape, dtype, seed))
        return norm

    @cached_property
    def draws(self) -> bool:
        """True if a training forward uses torch's global random state, as dropout does."""
        norm, before = self.norm(self.smallest), torch.get_rng_state()
        norm(values(self.smallest))
        return not torch.equal(before, torch.get_rng_state())

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
        """The value of that argument: the user's or `eps`."""
        if self.eps_name is None:
            return None
        argument = arguments_of(bind_eps(self.make, self.eps))[self.eps_name]
        return None if argument.default in (None, argument.empty) else float(argument.default)


def run_checks(section: Any, checks: Sequence[Check], subject: Subject) -> list[Line]:
    """Runs checks one by one: an exception is a failure of its own check.

    Every check starts from the same random state, and leaves the caller's as it was.
    """
    lines = []
    for check in checks:
        with fixed_draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = check(subject)
            except Exception as error:  # of foreign code, any kind
                found = Finding("fail", detail=f"{type(error).__name__}: {first_line(error)}")
        name, question = check.name, check.question
        lines.append(Line(section, name, found.status, found.value, found.detail, question))
    return lines


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
            responds to small steps of most, and pools channels if it does so at any number. (A
            group of one or two channels may not.)
        slots: the slots that the norm's YAML sets.

    Raises:
        UserError: not callable, an unknown knob, an argument that is not set, no nn.Module; with
            the constructor's own error as its cause if that raised.
    """
    found: list[tuple[int, int, bool, Subject]] = []
    refusal: UserError | None = None
    for channels in FEATURES if num_features is None else (num_features,):
        try:
            with fixed_draws():
                bare = Subject(target, make, eps, channels, slots=slots or Slots())
                subject = _find_shapes(_find_layout(bare))
        except UserError as error:
            refusal = refusal or error
            continue
        responding = sum(_responds(subject, shape) for shape in subject.shapes)
        found.append((len(subject.shapes), responding, _pools_channels(subject), subject))
    if not found:
        assert refusal is not None
        raise refusal
    return max(found, key=lambda entry: entry[:3])[3]  # the first of equals


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


def _find_shapes(subject: Subject) -> Subject:
    shapes = (shape_at(subject.num_features, step) for step in LADDER)
    return replace(subject, shapes=tuple(shape for shape in shapes if accepts(subject, shape)))


def accepts(subject: Subject, shape: Shape) -> bool:
    """True if the norm maps inputs of this shape to the same shape, in both modes."""

    def keeps_shape() -> bool:
        norm, x = subject.norm(shape), values(shape)
        return all(norm.train(mode)(x).shape == shape for mode in MODES)

    return _is_shown(keeps_shape)


def _responds(subject: Subject, shape: Shape) -> bool:
    """True if a small step of the input moves many training outputs."""

    def moves_many() -> bool:
        x, step = values(shape), 0.1 * values(shape, seed=1)
        before, after = (subject.trained(shape)(given) for given in (x, x + step))
        moved = moved_places(before, after, scale=0.01, tolerance=1e-3)
        return float(moved.float().mean()) > RESPONDING

    return _is_shown(moves_many)


def _pools_channels(subject: Subject) -> bool:
    def reads() -> bool:
        probe = Probe(subject.trained(subject.largest))
        return probe.reads_across(values(subject.largest), 1) is not None

    return bool(subject.shapes) and _is_shown(reads)


def _is_shown(question: Callable[[], bool]) -> bool:
    """The answer; false if the norm raises, as the lines of the card then say."""
    with fixed_draws(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return question()
        except Exception:  # of foreign code, any kind
            return False


@torch.no_grad()
def _wake(norm: nn.Module, x: Tensor) -> None:
    """Sets parameters that are all zero to one where zeros hide how outputs depend on inputs.

    A bias does not: it moves the outputs of two inputs alike, and stays as it is.
    """
    twin = copy.deepcopy(norm)
    own = dict(norm.named_parameters())
    for name, parameter in twin.named_parameters():
        if not parameter.any():
            before = _difference(twin, x)
            parameter.fill_(1)
            if before.isfinite().all() and moves(before, _difference(twin, x)):
                own[name].fill_(1)
            else:
                parameter.zero_()


def _difference(norm: nn.Module, x: Tensor) -> Tensor:
    """What separates the outputs of two inputs of the same shape."""
    return norm(3 * x.flip(0) + 1) - norm(x)


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


def relative_change(before: Tensor, after: Tensor) -> float:
    """Largest difference over the largest value; NaN equals NaN, and is infinitely far from 1."""
    before, after = before.detach().double(), after.detach().double()
    if torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):
        return 0.0
    change = float((after - before).abs().amax() / before.abs().amax().clamp(min=1e-30))
    return change if change < float("inf") else float("inf")


def show(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))})"


def mode_name(training: bool) -> str:
    return "in training" if training else "in evaluation"
