"""A norm under examination: how it is built, which inputs it takes, and inputs to show it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.adapt import EPS_NAMES, PROBED_DIMS, Layout, adapt, bind_eps, find_layout
from normexp.norms.slots import Slots
from normexp.norms.state import State

Shape = tuple[int, ...]
# Samples and positions of the inputs, the smallest first; channels come between.
LADDER = ((2,), (5,), (2, 3), (2, 2, 3), (4, 5), (2, 2, 2, 3), (4, 4, 6))
# Numbers of channels to try: a norm may divide them into as many as 32 groups.
FEATURES = (8, 16, 32, 64)
DRAWS = "draws random numbers, other ones in each dtype"
FIRST = Layout(channels_last=False, num_dims=PROBED_DIMS)


@dataclass(frozen=True)
class Subject:
    """A norm that can be built again and again.

    Attributes:
        name: as the user calls it.
        target: its import path, for messages.
        make: a class or partial that returns an nn.Module, with the user's knobs bound.
        eps: passed where the signature has one and the user has not set it.
        shapes: the inputs (N, C, *) of LADDER that it maps to the same shape.
        slots: what it brings along for its surroundings.
    """

    name: str
    target: str
    make: Callable[..., Any]
    eps: float | None
    num_features: int
    layout: Layout
    shapes: tuple[Shape, ...] = ()
    slots: Slots = Slots()

    @property
    def smallest(self) -> Shape:
        return self.shapes[0]

    @property
    def largest(self) -> Shape:
        return self.shapes[-1]

    def with_dims(self, num_dims: int) -> list[Shape]:
        return [shape for shape in self.shapes if len(shape) == num_dims]

    def bare(self, shape: Shape, **knobs: Any) -> nn.Module:
        """The norm as it is, for inputs of one shape (N, C, *)."""
        _, num_features, *positions = shape
        make = self.make
        needed = arguments_of(make).get("num_positions")
        if needed is not None and needed.default is needed.empty:
            make = partial(make, num_positions=positions[-1] if positions else 1)
        make = partial(make, **knobs) if knobs else make
        return adapt(make, target=self.target, eps=self.eps)(num_features)

    def norm(self, shape: Shape, dtype: torch.dtype = torch.float32, **knobs: Any) -> nn.Module:
        """The norm as (N, C, *) -> (N, C, *), in training mode and with its first values.

        What it draws, now and in the forwards that follow, is the same each time.
        """
        seed_draws()
        return self.layout.present(self.bare(shape, **knobs)).to(dtype).train()

    def trained(self, shape: Shape, dtype: torch.dtype = torch.float32, **knobs: Any) -> nn.Module:
        """The norm after two training forwards; a scale that starts at zero is set to one."""
        norm = self.norm(shape, dtype, **knobs)
        _wake(norm, values(shape, dtype))
        with torch.no_grad():
            for seed in (1, 2):
                norm(0.5 + 1.5 * values(shape, dtype, seed))
        return norm

    @property
    def draws(self) -> bool:
        """Whether a training forward uses torch's global random state, as dropout does."""
        norm, before = self.norm(self.smallest), torch.get_rng_state()
        norm(values(self.smallest))
        return not torch.equal(before, torch.get_rng_state())

    @property
    def takes(self) -> str:
        """The inputs that the norm takes as it is, in words."""
        own = [n for n in self.layout.num_dims if self.with_dims(n)]
        return str(replace(self.layout, num_dims=tuple(own))) if own else "no input"

    @property
    def eps_name(self) -> str | None:
        """The argument that takes eps; None where there is none."""
        names = [name for name in EPS_NAMES if name in arguments_of(self.make)]
        return names[0] if names else None

    @property
    def eps_value(self) -> float | None:
        """What that argument is: the user's or `eps`."""
        if self.eps_name is None:
            return None
        argument = arguments_of(bind_eps(self.make, self.eps))[self.eps_name]
        return None if argument.default in (None, argument.empty) else float(argument.default)


def open_subject(
    make: Callable[..., Any],
    *,
    name: str,
    target: str,
    eps: float | None = None,
    num_features: int | None = None,
    slots: Slots | None = None,
) -> Subject:
    """Finds the layout, the number of channels and the inputs that a norm takes.

    Args:
        num_features: channels; by default the fewest at which it takes most numbers of dimensions.
        slots: what the norm brings along for its surroundings.

    Raises:
        UserError: not callable, an unknown knob, an argument that is not set, no nn.Module; with
            the constructor's own error as its cause where that raised.
    """
    choices = FEATURES if num_features is None else (num_features,)
    found: list[Subject] = []
    refusal: UserError | None = None
    for channels in choices:
        bare = Subject(name, target, make, eps, channels, FIRST, (), slots or Slots())
        try:
            found.append(_find_shapes(_find_layout(bare)))
        except UserError as error:
            refusal = refusal or error
        if found and len(found[-1].shapes) == len(LADDER):
            break
    if not found:
        assert refusal is not None
        raise refusal
    return max(found, key=lambda subject: len(subject.shapes))  # the first of equals


def arguments_of(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The signature, bound knobs as defaults; nothing for what is written in C."""
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}


def values(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Fixed standard normal numbers, drawn in float64 for every dtype."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


def seed_draws() -> None:
    """Before two forwards that should agree although the norm draws random numbers."""
    torch.default_generator.manual_seed(0)


def shape_at(num_features: int, step: Shape) -> Shape:
    """(N, C, *) of a step of the ladder."""
    return (step[0], num_features, *step[1:])


def relative_change(before: Tensor, after: Tensor) -> float:
    """Largest difference over the largest value; infinite where one alone is finite."""
    if not before.numel():
        return 0.0
    before, after = before.double(), after.double()
    if not (before.isfinite().all() and after.isfinite().all()):
        return 0.0 if torch.equal(before.nan_to_num(), after.nan_to_num()) else float("inf")
    scale = before.abs().amax().clamp(min=1e-30)
    return float((after - before).abs().amax() / scale)


def state_change(before: State, after: State) -> float:
    """The largest relative change of any buffer."""
    changes = [relative_change(before[name].double(), after[name].double()) for name in before]
    return max(changes, default=0.0)


def show(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))})"


def _find_layout(bare: Subject) -> Subject:
    """With the layout of the norm; channels first where it is ours or its layout cannot be told."""
    if bare.target.startswith("normexp.norms."):
        bare.bare(shape_at(bare.num_features, LADDER[-1]))  # refused here, as it would be later
        return bare
    try:
        layout = find_layout(
            lambda num_features: bare.bare(shape_at(num_features, LADDER[-1])),
            bare.num_features,
            target=bare.target,
        )
    except UserError:
        bare.bare(shape_at(bare.num_features, LADDER[-1]))
        return bare
    return replace(bare, layout=layout)


def _find_shapes(subject: Subject) -> Subject:
    shapes = [shape_at(subject.num_features, step) for step in LADDER]
    taken = [shape for shape in shapes if _takes(subject, shape)]
    return replace(subject, shapes=tuple(taken))


def _takes(subject: Subject, shape: Shape) -> bool:
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            norm = subject.norm(shape)
            x = values(shape)
            return all(norm.train(mode)(x).shape == shape for mode in (True, False))
        except Exception:  # of foreign code, any kind: the lines of the card say which
            return False


def _wake(norm: nn.Module, x: Tensor) -> None:
    """Parameters that are all zero become one where the output would ignore its input."""
    with torch.no_grad():
        out = norm(x)
        if out.isfinite().all() and relative_change(out, norm(3 * x.flip(0) + 1)) == 0:
            for parameter in norm.parameters():
                if not parameter.any():
                    parameter.fill_(1)
