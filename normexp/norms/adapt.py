"""Adapts norms from outside this package to (N, C, *) -> same, built from a number of features.

Arguments. The number of features goes to the argument that is named for it. A required argument of
another name gets it only if the norm then takes inputs of that many channels and no others. eps has
one value for all norms, unless the user gives this one its own.

Layout. Every layout is tried on a fresh norm, in training and evaluation, with an input whose sizes
all differ. A layout fits if the output has the input's shape and no warning is raised. If none
fits, the norm is refused with the problem of the layout that got furthest.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normexp.errors import UserError
from normexp.records.sources import source_line_of

logger = logging.getLogger(__name__)

Build = Callable[[int], nn.Module]

# Argument names for the number of features, the least ambiguous first.
FEATURE_NAMES = (
    *("num_features", "num_channels", "n_features", "n_channels", "channels", "features"),
    *("normalized_shape", "normalized_dim", "hidden_size", "hidden_dim", "d_model", "embed_dim"),
    *("in_features", "in_channels", "width", "dim"),
)
KNOWN_NAMES = (*FEATURE_NAMES, "_")  # by convention a norm does not use an argument named _
AMBIGUOUS_NAMES = ("width", "dim")  # with a default, these may be an axis or a window
EPS_NAMES = ("eps", "epsilon", "variance_epsilon")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)

PROBED_DIMS = (2, 3, 4, 5)


def foreign_factory(make: Callable[..., Any], *, target: str, eps: float) -> Build:
    """Returns a function that builds a foreign norm as (N, C, *) -> same.

    Args:
        make: a class or partial that returns an nn.Module, with the user's knobs bound.
        target: its name, for messages.
        eps: passed if the signature has one and the user has not set it.

    Raises:
        UserError: as `adapt`; when the first norm is built, as `find_layout`.
    """
    build = adapt(make, target=target, eps=eps)
    argument = _eps_argument(make)
    if argument is not None and isinstance(argument.default, float) and argument.default != eps:
        key, default = f"norm.{argument.name}", argument.default
        logger.info(
            "%s=%s replaces the default %s of %s; %s=%s keeps it",
            *(key, eps, default, target, key, default),
        )
    layout: Layout | None = None

    def norm(num_features: int) -> nn.Module:
        nonlocal layout
        if layout is None:
            try:
                layout = find_layout(build, num_features, target=target)
            except UserError as error:
                fixed = [
                    f"norm.{name}" for name in FEATURE_NAMES if name in _flatten(make).keywords
                ]
                hint = f"; drop {fixed[0]}, which each site sets itself" if fixed else ""
                raise UserError(f"{error}{hint}") from error
            logger.info("norm._target_=%s takes %s", target, layout)
            if 2 not in layout.num_dims:
                logger.info(
                    "norm.view=token shows it single tokens, norm.view=sequence whole texts"
                )
        return layout.present(build(num_features))

    return norm


def adapt(make: Callable[..., Any], *, target: str, eps: float | None) -> Build:
    """Returns `make` as a function of the number of features alone.

    Raises:
        UserError: a knob that the target does not have, or a required argument that is not set;
            when called, an error of the constructor, a result that is not an nn.Module, or a
            required argument that turns out not to be the number of features.
    """
    call = _flatten(bind_eps(make, eps))
    free = _free_arguments(call)
    feature = _feature_argument(free)
    if missing := [p.name for p in free if p is not feature and _is_required(p)]:
        raise UserError(_needs(target, missing[0]))

    def construct(num_features: int) -> nn.Module:
        positional, keywords = (), {}
        if feature is not None and feature.kind in POSITIONAL:
            positional = (num_features,)
        elif feature is not None:
            keywords = {feature.name: num_features}
        try:
            norm = call(*positional, **keywords)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"norm._target_={target} cannot be built for {num_features} features: "
                f"{_described(error)}"
            ) from error
        if not isinstance(norm, nn.Module):
            kind = type(norm).__name__
            raise UserError(f"norm._target_={target} made a {kind}, not an nn.Module")
        for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
            if not tensor.is_leaf:
                raise UserError(
                    f"norm._target_={target}: {name} is no leaf but the result of a computation, "
                    "so the norm cannot be copied; compute it in the forward"
                )
        return norm

    if feature is None or not _is_required(feature) or feature.name in KNOWN_NAMES:
        return construct
    is_checked = False

    def construct_by_guess(num_features: int) -> nn.Module:
        nonlocal is_checked
        if not is_checked:
            _refuse_wrong_guess(construct, num_features, feature.name, target)
            is_checked = True
        return construct(num_features)

    return construct_by_guess


def _refuse_wrong_guess(build: Build, num_features: int, argument: str, target: str) -> None:
    """Raises UserError unless a norm built for `num_features` takes that many channels alone."""
    hint = f"{_needs(target, argument)}, or call it num_features if that is what it is"
    try:
        layout = find_layout(build, num_features, target=target)
    except UserError as error:
        raise UserError(f"{hint} ({argument}={num_features}: {error})") from error
    probe = _LayoutProbe(build, num_features, target)
    x = probe.input(layout.num_dims[-1], channels_last=layout.channels_last, times=2)
    with torch.random.fork_rng(devices=[]):
        norm = probe.fresh()
        try:
            takes_others = norm(x).shape == x.shape
        except Exception:  # of foreign code, any kind
            takes_others = False
    if takes_others:
        raise UserError(hint)


def _needs(target: str, argument: str) -> str:
    return f"norm._target_={target} needs the argument {argument}; set norm.{argument}=..."


def bind_eps(make: Callable[..., Any], eps: float | None) -> Callable[..., Any]:
    """Returns `make` with `eps` bound under its name in the signature, unless it is set."""
    argument = _eps_argument(make)
    return make if eps is None or argument is None else partial(make, **{argument.name: eps})


def _eps_argument(make: Callable[..., Any]) -> inspect.Parameter | None:
    if not callable(make):
        raise UserError(f"norm._target_ names {make!r}, which cannot be called")
    free = _free_arguments(_flatten(make))
    named = (p for p in free if p.name in EPS_NAMES and p.kind is not p.POSITIONAL_ONLY)
    return next(named, None)


def _flatten(make: Callable[..., Any]) -> partial[Any]:
    """Merges nested partials into one; functools leaves those of Hydra's subclass nested."""
    args: tuple[Any, ...] = ()
    knobs: dict[str, Any] = {}
    while isinstance(make, partial):
        args, knobs = (*make.args, *args), {**make.keywords, **knobs}
        make = make.func
    return partial(make, *args, **knobs)


def _free_arguments(call: partial[Any]) -> list[inspect.Parameter]:
    """Returns the arguments of the function that are not bound yet."""
    function = call.func
    if getattr(function, "__init__", None) is nn.Module.__init__:
        return []  # takes no arguments, despite its signature
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a signature: assume one positional argument
        return [inspect.Parameter("num_features", inspect.Parameter.POSITIONAL_ONLY)]
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in call.keywords if name not in parameters]
    if unknown:
        name = f"{function.__module__}.{function.__qualname__}"
        raise UserError(
            f"norm.{unknown[0]}: {name} has no such argument; it has {', '.join(parameters)}"
        )
    bound = signature.bind_partial(*call.args, **call.keywords).arguments
    return [p for name, p in parameters.items() if name not in bound]


def _feature_argument(free: list[inspect.Parameter]) -> inspect.Parameter | None:
    """Returns the argument that takes the number of features, or None if there is none."""

    def known(choices: list[inspect.Parameter]) -> list[inspect.Parameter]:
        named = [p for p in choices if p.name in FEATURE_NAMES]
        return sorted(named, key=lambda p: FEATURE_NAMES.index(p.name))

    required = [p for p in free if _is_required(p)]
    optional = [p for p in free if p not in required and p.name not in AMBIGUOUS_NAMES]
    positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
    rest = [p for p in free if p.kind is p.VAR_POSITIONAL]
    return next(iter([*known(required), *positional, *known(optional), *rest]), None)


def _is_required(argument: inspect.Parameter) -> bool:
    variadic = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    return argument.default is argument.empty and not variadic


@dataclass(frozen=True)
class Layout:
    """Where a norm expects its channels, and which numbers of dimensions it accepts."""

    channels_last: bool
    num_dims: tuple[int, ...]

    def __str__(self) -> str:
        where = "last" if self.channels_last else "first"
        return f"channels {where}, {' '.join(f'{n}-D' for n in self.num_dims)} inputs"

    def present(self, norm: nn.Module) -> nn.Module:
        """Returns `norm` as (N, C, *) -> (N, C, *), wrapped only if necessary."""
        fits = not self.channels_last and self.num_dims == PROBED_DIMS
        return norm if fits else LayoutAdapter(norm, self)


class LayoutAdapter(nn.Module):
    """Adapts a norm of another layout, or for some numbers of dimensions, to (N, C, *) -> same.

    Adds missing position axes with size 1 and joins surplus ones; a norm that accepts only 2-D
    inputs sees each position as a sample.
    """

    adds_level = "norm"

    def __init__(self, norm: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.norm = norm
        self.layout = layout

    def extra_repr(self) -> str:
        return str(self.layout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(N, C, *) -> same; mask (N, *), for a norm that takes one."""
        if not self.layout.channels_last:
            return self._fit_and_apply(x, mask, first_position=2)
        return self._fit_and_apply(x.movedim(1, -1), mask, first_position=1).movedim(-1, 1)

    def _fit_and_apply(self, x: Tensor, mask: Tensor | None, first_position: int) -> Tensor:
        accepted = self.layout.num_dims
        if larger := [n for n in accepted if n >= x.ndim]:
            ones = [1] * (larger[0] - x.ndim)
            shown = x.reshape([*x.shape[:first_position], *ones, *x.shape[first_position:]])
        elif accepted[-1] == 2:
            shown = x.flatten(0, -2)  # (N, *, C) -> (N * positions, C)
        else:
            surplus = x.ndim - accepted[-1]
            shown = x.flatten(first_position, first_position + surplus)
        if mask is None:
            return self.norm(shown).reshape(x.shape)
        without_channels = [*shown.shape]
        del without_channels[-1 if self.layout.channels_last else 1]
        return self.norm(shown, mask=mask.reshape(without_channels)).reshape(x.shape)


def find_layout(build: Build, num_features: int, *, target: str) -> Layout:
    """Returns the layout of a norm.

    If both layouts are accepted, channels are first, unless a 4-D input shows that the norm pools
    the last axis alone. The global random state is left unchanged.

    Raises:
        UserError: no input is accepted; or a fault that no layout avoids: no tensor or another
            dtype comes out, two forwards in evaluation differ, a forward creates a parameter.
    """
    probe = _LayoutProbe(build, num_features, target)
    with torch.random.fork_rng(devices=[]):
        # torch warns when it reads (N, C) as one sample without a batch axis, so a warning counts
        # as a refusal, unless the norm warns at every input.
        trials = probe.try_layouts("error")
        if all(trial.problem for trial in trials):
            trials = probe.try_layouts("ignore")
        taken = [trial for trial in trials if trial.problem is None]
        reshaped = [trial for trial in trials if trial.reshapes]
        if not taken or (reshaped and {trial.num_dims for trial in taken} == {2}):
            best = max(reshaped if taken else trials, key=lambda trial: trial.reached)
            probe.refuse(f"does not fit: probed on a few samples, it {best.problem}")
        first = tuple(trial.num_dims for trial in taken if not trial.channels_last)
        last = tuple(trial.num_dims for trial in taken if trial.channels_last)
        channels_last = first in ((), (2,))
        if 4 in first and 4 in last:
            channels_last = probe.pools_last_axis_alone()
    return Layout(channels_last, last if channels_last else first)


@dataclass(frozen=True)
class _Trial:
    """The result of running a fresh norm on one input.

    Attributes:
        problem: None if the norm takes the input.
        reached: line numbers of the failure's traceback, outermost call first: the greatest tuple
            got furthest. Empty if the output has another number of dimensions.
        reshapes: the output has another shape.
    """

    num_dims: int
    channels_last: bool
    problem: str | None = None
    reached: tuple[int, ...] = (sys.maxsize,)  # the end
    reshapes: bool = False


@dataclass(frozen=True)
class _LayoutProbe:
    """Runs fresh norms on small inputs; each norm starts from the same values and draws."""

    build: Build
    num_features: int
    target: str

    def fresh(self) -> nn.Module:
        """Returns a norm in training mode; a copy, as `build` may hand out one module twice."""
        torch.default_generator.manual_seed(0)
        norm = self.build(self.num_features)
        if not any(map(is_lazy, norm.parameters())):  # a lazy norm, refused later, has no copy
            norm = copy.deepcopy(norm)
        return norm.train()

    def input(self, num_dims: int, *, channels_last: bool, times: int = 1) -> Tensor:
        """Returns a random input with distinct sizes, with `times` as many channels."""
        sizes = [size for size in (4, 5, 6, 7, 8) if size != self.num_features][: num_dims - 1]
        sizes.insert(len(sizes) if channels_last else 1, times * self.num_features)
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0))

    def try_layouts(self, on_warning: Literal["error", "ignore"]) -> list[_Trial]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter(on_warning, UserWarning)
            return [self.try_layout(n, last) for n in PROBED_DIMS for last in (False, True)]

    def try_layout(self, num_dims: int, channels_last: bool) -> _Trial:
        """Runs a norm in training, then in evaluation on another input."""
        norm, x = self.fresh(), self.input(num_dims, channels_last=channels_last)
        trial = partial(_Trial, num_dims, channels_last)
        parameters = dict(norm.named_parameters())
        self._refuse_late([name for name, p in parameters.items() if is_lazy(p)])
        shapes, out, again, failure = _shapes_of_buffers(norm), None, [], None
        try:
            out = norm(x)
            again = [norm.eval()(1 + 2 * x.flip(0)) for _ in range(2)]
        except Exception as error:  # of foreign code, any kind
            failure = error
        self._refuse_late([n for n, p in norm.named_parameters() if p is not parameters.get(n)])
        if failure is not None:
            problem = f"fails on an input of shape {tuple(x.shape)}: {_described(failure)}"
            return trial(problem, tuple(line for _, line in walk_tb(failure.__traceback__)))
        if not isinstance(out, Tensor):
            self.refuse(f"returns a {type(out).__name__}, not a tensor")
        if out.shape != x.shape:
            problem = f"changes the shape, {tuple(x.shape)} to {tuple(out.shape)}"
            if out.ndim != x.ndim:  # broadcasting let a formula for other dimensions pass
                return trial(problem, reached=(), reshapes=True)
            return trial(problem, reshapes=True)
        if any(_shapes_of_buffers(norm).get(name) != shape for name, shape in shapes.items()):
            return trial(f"changes the shape of its buffers on an input of shape {tuple(x.shape)}")
        if out.dtype != x.dtype:  # this fault and the next would otherwise show far from here
            self.refuse(
                f"returns {out.dtype} for an input of {x.dtype}; end its forward with .to(x.dtype)"
            )
        if not torch.allclose(*again, rtol=0, atol=0, equal_nan=True):
            self.refuse("is not deterministic: in evaluation mode two forwards of one input differ")
        return trial()

    def pools_last_axis_alone(self) -> bool:
        """True if a value of a 4-D input influences others along the last axis alone."""
        x = self.input(4, channels_last=False)
        moved = x.clone()
        moved[0, 0, 0, 0] += 1
        changed = self.fresh()(x) != self.fresh()(moved)
        others = changed[0, 1:, 0, 0].any() or changed[0, 0, 1:, 0].any()
        return bool(changed[0, 0, 0, 1:].any()) and not bool(others)

    def _refuse_late(self, names: list[str]) -> None:
        if names:
            self.refuse(
                f"creates its parameter {names[0]} in its first forward, "
                "too late for the optimizer; create it in __init__"
            )

    def refuse(self, fault: str) -> NoReturn:
        raise UserError(f"norm._target_={self.target} {fault}")


def _described(error: Exception) -> str:
    """The type and the first line of an error, and the line of the user's file that raised it."""
    message = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {message}{source_line_of(error)}"


def _shapes_of_buffers(norm: nn.Module) -> dict[str, torch.Size]:
    """Of buffers with values; the others get their shape in the first forward."""
    return {name: buffer.shape for name, buffer in norm.named_buffers() if buffer.numel()}
