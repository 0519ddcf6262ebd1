"""A norm by itself: how to build it, and the inputs that it takes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from normexp.checks.probe import (
    MODES,
    Probe,
    after_many_steps,
    all_in_float64,
    changes,
    fixed_draws,
    in_float64,
    moves,
    normal,
    phases,
    widened,
)
from normexp.config.target import Target
from normexp.errors import UserError
from normexp.norms.adapt import (
    EPS_NAMES,
    PROBED_DIMS,
    Layout,
    adapt,
    bind_eps,
    find_layout,
)
from normexp.norms.factory import is_shipped
from normexp.norms.slots import Slots

Shape = tuple[int, ...]
# Samples and positions of the inputs, the smallest first; channels come between.
LADDER = ((2,), (5,), (2, 3), (2, 2, 3), (4, 5), (2, 2, 2, 3), (4, 4, 6))
# Numbers of channels to try: a norm may divide them into as many as 32 groups.
FEATURES = (8, 16, 32, 64, 128)
SMALL_STEP = 1e-6  # from 1, visible in float32 but not in half precision
RESPONDING = 0.25  # of the outputs; an activation may clamp half of them


@dataclass(frozen=True)
class LoneNorm:
    """A norm that questions can build repeatedly.

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

    def at(self, shape: Shape) -> NormCase:
        return NormCase(self, shape)

    @property
    def smallest(self) -> NormCase:
        return self.at(self.shapes[0])

    @property
    def largest(self) -> NormCase:
        return self.at(self.shapes[-1])

    def with_dims(self, *num_dims: int) -> list[Shape]:
        return [shape for shape in self.shapes if len(shape) in num_dims]

    @cached_property
    def draws(self) -> bool:
        """True if a training forward uses torch's global random state, as dropout does."""
        return Probe(self.smallest.build(), self.smallest.values()).observe().drew

    @cached_property
    def computes_in_half(self) -> bool:
        """True if a small step of a float64 input moves almost no output that a large one moves."""
        if self.probed_in != torch.float64:
            return False
        x, direction = (self.largest.values(torch.float64, seed) for seed in (0, 1))
        probe = self.largest.probe(training=True)
        outs = [probe.observe(x + step * direction).output for step in (0.0, SMALL_STEP, 1.0)]
        small, large = (int((out != outs[0]).sum()) for out in outs[1:])
        return small < 0.1 * large

    @cached_property
    def probed_in(self) -> torch.dtype:
        """float64, or float32 for code that only computes in that."""
        wide = in_float64(self.smallest.build(), self.smallest.values())
        return torch.float32 if wide is None else torch.float64

    @cached_property
    def takes_float64(self) -> bool:
        """False if it fails as it stands, with its parameters in float64, on such an input."""
        try:
            self.smallest.build(torch.float64)(self.smallest.values(torch.float64))
        except Exception:  # of foreign code, any kind
            return False
        return True

    @property
    def is_shipped(self) -> bool:
        return is_shipped(self.target)

    @property
    def takes(self) -> str:
        """The inputs that the norm accepts without a wrapper, in words."""
        num_dims = tuple(n for n in self.layout.num_dims if self.with_dims(n))
        return str(replace(self.layout, num_dims=num_dims)) if num_dims else "no input"

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


@dataclass(frozen=True)
class NormCase:
    """A norm by itself, with the shape (N, C, *) of its input."""

    lone: LoneNorm
    shape: Shape

    def values(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        """Fixed standard normal numbers of this shape, the same in every dtype."""
        return values(self.shape, dtype, seed)

    def bare(self, **knobs: Any) -> nn.Module:
        """The norm without a wrapper; a shipped one is built directly."""
        _, num_features, *positions = self.shape
        path, eps = self.lone.target, self.lone.eps
        target = Target("norm", path, partial(self.lone.make, **knobs))
        target = target.filled_in({"num_positions": positions[-1] if positions else 1})
        if not self.lone.is_shipped:
            return adapt(target.call, target=path, eps=eps)(num_features)
        target = target if eps is None else target.filled_in({"eps": eps})
        return target.make(nn.Module, num_features)

    def build(self, dtype: torch.dtype = torch.float32, **knobs: Any) -> nn.Module:
        """The norm as (N, C, *) -> (N, C, *), in training mode and with its first values.

        It draws the same random numbers each time, here and in the forwards that follow.
        """
        torch.default_generator.manual_seed(0)
        return self.lone.layout.present(self.bare(**knobs)).to(dtype).train()

    def trained(self, dtype: torch.dtype = torch.float64, **knobs: Any) -> nn.Module:
        """The norm after two training forwards; see `_fill_hiding_zeros` for zeros."""
        norm = self.build(dtype, **knobs)
        is_double = dtype == torch.float64
        norm = widened(norm) if is_double else norm
        with torch.no_grad(), all_in_float64() if is_double else nullcontext():
            _fill_hiding_zeros(norm, self.values(dtype))
            for seed in (1, 2):
                norm(0.5 + 1.5 * self.values(dtype, seed))
        return norm

    def probe(self, training: bool = True, dtype: torch.dtype | None = None, **knobs: Any) -> Probe:
        """A probe of the trained norm, on `values`; in float64 if the norm computes so."""
        dtype = dtype or self.lone.probed_in
        norm, x = self.trained(dtype, **knobs).train(training), self.values(dtype)
        return Probe(norm, x, is_sensitive=True)

    def probes(self, training: bool) -> Iterator[Probe]:
        """Of the trained norm and, where it differs then, of the norm later in a training."""
        yield self.probe(training)
        dtype = self.lone.probed_in
        norm, x = self.trained(dtype), self.values(dtype)
        late = after_many_steps(norm, x)
        modules = [] if late is None else [late]
        modules += [] if self.lone.is_shipped else phases(norm, x)
        for module in modules:
            yield Probe(module.train(training), x, is_sensitive=True)

    def to_save(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The norm with its first values, and its inputs."""
        return self.build(), (self.values(),)


@torch.no_grad()
def _fill_hiding_zeros(norm: nn.Module, x: Tensor) -> None:
    """Sets parameters that are all zero to one where zeros hide how outputs depend on inputs.

    A bias hides nothing, because it moves the outputs of two inputs alike; it stays zero.
    """

    def contrast() -> Tensor:
        probe = Probe(norm, x)
        return probe.observe(3 * x.flip(0) + 1).output - probe.observe().output

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


def open_norm(
    make: Callable[..., Any],
    *,
    target: str,
    eps: float | None = None,
    num_features: int | None = None,
    slots: Slots | None = None,
) -> LoneNorm:
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
    built: list[LoneNorm] = []
    refusals: list[UserError] = []
    for channels in FEATURES if num_features is None else (num_features,):
        try:
            with fixed_draws():
                lone = _find_layout(LoneNorm(target, make, eps, channels, slots=slots or Slots()))
        except UserError as error:
            refusals.append(error)
            continue
        shapes = (shape_at(channels, step) for step in LADDER)
        shapes = tuple(shape for shape in shapes if accepts(lone.at(shape)))
        built.append(replace(lone, shapes=shapes))
    if not built:
        raise refusals[0]
    return max(built, key=_measurability)  # the first of equals


def _find_layout(lone: LoneNorm) -> LoneNorm:
    """Sets the layout; channels first for shipped norms and if no layout can be determined."""
    shape = shape_at(lone.num_features, LADDER[-1])
    lone.at(shape).bare()  # refused here, as it would be later
    if lone.is_shipped:
        return lone
    try:
        build = lambda num_features: lone.at(shape_at(num_features, LADDER[-1])).bare()  # noqa: E731
        return replace(lone, layout=find_layout(build, lone.num_features, target=lone.target))
    except UserError as error:
        return replace(lone, problem=str(error).removeprefix(f"norm._target_={lone.target} "))


def _measurability(lone: LoneNorm) -> tuple[int, int, bool]:
    """How much of a norm's behaviour shows at this number of channels; tuples compare."""
    responding = sum(_responds(lone.at(shape)) for shape in lone.shapes)
    pools = any(_pools_channels(lone.at(shape)) for shape in lone.shapes[-1:])
    return len(lone.shapes), responding, pools


def _false_if_it_raises(test: Callable[[NormCase], bool]) -> Callable[[NormCase], bool]:
    """Answers false if foreign code raises; the lines of the card then name the exception."""

    @wraps(test)
    def run(case: NormCase) -> bool:
        with fixed_draws(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return test(case)
            except Exception:
                return False

    return run


@_false_if_it_raises
def accepts(case: NormCase) -> bool:
    """True if the norm maps inputs of this shape to the same shape, in both modes."""
    norm, x = case.build(), case.values()
    return all(norm.train(mode)(x).shape == case.shape for mode in MODES)


@_false_if_it_raises
def _responds(case: NormCase) -> bool:
    """True if a small step of the input moves many training outputs."""
    x, step = case.values(), 0.1 * case.values(seed=1)
    outs = [case.trained(torch.float32)(given) for given in (x, x + step)]
    return float((changes(*outs, scale=0.01) > 1e-3).double().mean()) > RESPONDING


@_false_if_it_raises
def _pools_channels(case: NormCase) -> bool:
    return case.probe(dtype=torch.float32).reads_across(1) is not None
