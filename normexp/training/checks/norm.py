"""A norm by itself: how to build it, and the inputs that it takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.adapt import PROBED_DIMS, Layout, adapt, find_layout
from normexp.norms.factory import is_shipped
from normexp.training.checks.probe import MODES, Probe, fixed_draws, moves, normal
from normexp.training.config.target import Target

Shape = tuple[int, ...]
# Samples and positions of the inputs, the smallest first; channels come between.
LADDER = ((5,), (4, 5), (4, 4, 6), (2, 2, 2, 3))
# Numbers of channels to try: with 64, each of 32 groups still pools channels.
FEATURES = (64, 8)


@dataclass(frozen=True)
class LoneNorm:
    """A norm that questions can build repeatedly.

    Attributes:
        target: its import path, for messages.
        make: a class or partial that returns an nn.Module, with the user's knobs bound.
        eps: passed if the signature has such an argument and the user has not set it.
        shapes: the inputs (N, C, *) of LADDER that it maps to the same shape, smallest first.
        problem: why no input is taken; "" if one is.
        may_mix: False if it declares `mixes_samples = False`.
    """

    target: str
    make: Callable[..., Any]
    eps: float | None
    num_features: int
    layout: Layout = Layout(channels_last=False, num_dims=PROBED_DIMS)
    shapes: tuple[Shape, ...] = ()
    problem: str = ""
    may_mix: bool = True

    def at(self, shape: Shape, training: bool = True) -> NormCase:
        return NormCase(self, shape, training)

    def with_dims(self, *num_dims: int) -> list[Shape]:
        return [shape for shape in self.shapes if len(shape) in num_dims]

    @cached_property
    def draws(self) -> bool:
        """True if a training forward uses torch's global random state, as dropout does."""
        case = self.at(self.shapes[0])
        return Probe(case.build(), (case.values(),)).observe().drew

    @cached_property
    def takes_float64(self) -> bool:
        """False if it fails with its parameters and its input in float64."""
        case = self.at(self.shapes[0])
        try:
            case.build(torch.float64)(case.values(torch.float64))
        except Exception:  # of foreign code, any kind
            return False
        return True

    @property
    def takes(self) -> str:
        """The inputs that the norm accepts without a wrapper, in words."""
        num_dims = tuple(n for n in self.layout.num_dims if self.with_dims(n))
        return str(replace(self.layout, num_dims=num_dims)) if num_dims else "no input"


@dataclass(frozen=True)
class NormCase:
    """A norm by itself with the shape (N, C, *) of its input, in one mode."""

    lone: LoneNorm
    shape: Shape
    training: bool

    @property
    def mode(self) -> str:
        return mode_name(self.training)

    def values(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        """Fixed standard normal numbers of this shape, the same in every dtype."""
        return normal(self.shape, seed).to(dtype)

    def bare(self) -> nn.Module:
        """The norm without a wrapper; a shipped one is built directly."""
        _, num_features, *positions = self.shape
        path, eps = self.lone.target, self.lone.eps
        target = Target("norm", path, partial(self.lone.make))
        target = target.filled_in({"num_positions": positions[-1] if positions else 1})
        if not is_shipped(path):
            return adapt(target.call, target=path, eps=eps)(num_features)
        if eps is not None:
            target = target.filled_in({"eps": eps})
        return target.make(nn.Module, num_features)

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The norm as (N, C, *) -> (N, C, *), in training mode and with its first values.

        It draws the same random numbers each time, here and in the forwards that follow.
        """
        torch.default_generator.manual_seed(0)
        return self.lone.layout.present(self.bare()).to(dtype).train()

    def probe(self) -> Probe:
        """A probe of the trained norm in the mode of this case."""
        return Probe(self.trained(torch.float32).train(self.training), (self.values(),))

    def trained(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The norm after two training forwards, without zeros that hide its dependences."""
        norm = self.build(dtype)
        with torch.no_grad():
            _fill_hiding_zeros(norm, self.values(dtype))
            for seed in (1, 2):
                norm(0.5 + 1.5 * self.values(dtype, seed))
        return norm


@torch.no_grad()
def _fill_hiding_zeros(norm: nn.Module, x: Tensor) -> None:
    """Sets parameters that are all zero to one if zeros hide how outputs depend on inputs.

    A bias moves the outputs of two inputs alike and hides nothing, so it stays zero.
    """
    probe = Probe(norm, (x,))

    def contrast() -> Tensor:
        return probe.observe(3 * x.flip(0) + 1).output - probe.observe().output

    for parameter in norm.parameters():
        if not parameter.any():
            before = contrast()
            parameter.fill_(1)
            hides = before.isfinite().all() and moves(before, contrast())
            if not hides:
                parameter.zero_()


def open_norm(
    make: Callable[..., Any],
    *,
    target: str,
    eps: float | None = None,
    num_features: int | None = None,
    layout: Literal["first", "last"] | None = None,
) -> LoneNorm:
    """Finds the layout, the number of channels and the inputs that a norm takes.

    Args:
        num_features: channels; by default the first of FEATURES that it can be built for.
        layout: where its channels are, if the user says it.

    Raises:
        UserError: not callable, an unknown knob, an argument that is not set, no nn.Module; with
            the constructor's own error as its cause if that raised.
    """
    refusals: list[UserError] = []
    for channels in FEATURES if num_features is None else (num_features,):
        try:
            with fixed_draws():
                return _find_inputs(LoneNorm(target, make, eps, channels), layout)
        except UserError as error:
            refusals.append(error)
    raise refusals[0]


def _find_inputs(lone: LoneNorm, typed: Literal["first", "last"] | None) -> LoneNorm:
    """Sets layout and shapes; channels first for shipped norms and if no layout is found."""
    shapes = [(samples, lone.num_features, *positions) for samples, *positions in LADDER]
    of_maps = lone.at(shapes[2])
    of_maps.bare()  # refused here, as it would be later
    if not is_shipped(lone.target):
        try:
            bare, channels = lambda _: of_maps.bare(), lone.num_features
            layout = find_layout(bare, channels, target=lone.target, layout=typed)
        except UserError as error:
            problem = str(error).removeprefix(f"norm._target_={lone.target} ")
            return replace(lone, problem=problem)
        lone = replace(lone, layout=layout)
    accepted = tuple(shape for shape in shapes if accepts(lone.at(shape)))
    return replace(lone, shapes=accepted, problem="" if accepted else "every input is refused")


def accepts(case: NormCase) -> bool:
    """True if the norm maps inputs of this shape to the same shape, in both modes."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            norm = case.build()
            return all(norm.train(mode)(case.values()).shape == case.shape for mode in MODES)
        except Exception:  # of foreign code, any kind
            return False


def show(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def mode_name(training: bool) -> str:
    return "in training" if training else "in evaluation"
