"""Adapts norms from outside this package: arguments by name, layout by a probe at build time.

foreign_factory    builds a norm from outside this package, for build.py
find_layout        finds the channel axis and accepted numbers of axes, from small forwards
adapt              turns any constructor into a function of the number of features
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normexp.errors import UserError

logger = logging.getLogger(__name__)

Build = Callable[[int], nn.Module]

PROBED_DIMS = (2, 3, 4, 5)


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
        return norm if fits else Presented(norm, self)


class Presented(nn.Module):
    """Wraps a norm of another layout, or with limited numbers of dimensions, as (N, C, *) -> same.

    Adds missing position axes with size 1 and joins surplus ones; a norm that accepts only 2-D
    inputs sees each position as a sample.
    """

    def __init__(self, norm: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.norm = norm
        self.layout = layout

    def extra_repr(self) -> str:
        return str(self.layout)

    def forward(self, x: Tensor) -> Tensor:
        if not self.layout.channels_last:
            return self._fit_and_apply(x, first_position=2)
        return self._fit_and_apply(x.movedim(1, -1), first_position=1).movedim(-1, 1)

    def _fit_and_apply(self, x: Tensor, first_position: int) -> Tensor:
        accepted = self.layout.num_dims
        larger = [n for n in accepted if n >= x.ndim]
        if larger:
            ones = [1] * (larger[0] - x.ndim)
            shape = [*x.shape[:first_position], *ones, *x.shape[first_position:]]
            shown = x.reshape(shape)
        elif accepted[-1] == 2:
            shown = x.flatten(0, -2)  # (N, *, C) -> (N * positions, C)
        else:
            surplus = x.ndim - accepted[-1]
            shown = x.flatten(first_position, first_position + surplus)
        return self.norm(shown).reshape(x.shape)


def first_line(error: Exception) -> str:
    """Returns an error's message in one line, with its type if it is empty or a bare key."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{type(error).__name__} {said}" if isinstance(error, KeyError) else said


def find_layout(build: Build, num_features: int, *, target: str) -> Layout:
    """Returns how the norm takes its input, from forwards on small inputs with distinct sizes.

    If both layouts are accepted, channels are first, unless a 4-D input shows that the norm pools
    the last axis alone. The global random state is left unchanged.

    Raises:
        UserError: no input is accepted, the shape changes, the output is no tensor, two forwards
            in evaluation differ, or a parameter is created in the first forward.
    """
    probe = _Probe(build, num_features, target)
    with torch.random.fork_rng(devices=[]):
        # torch warns when it reads (N, C) as one sample without a batch axis, so a warning counts
        # as a refusal, unless the norm warns at every input.
        for on_warning in ("error", "ignore"):
            first, last, problems = probe.accepted_dims(on_warning)
            if first or last:
                break
        if not first and not last:
            changes = [problem for problem in problems if problem.startswith("changes")]
            raise UserError(f"norm._target_={target} does not fit: it {(changes or problems)[0]}")
        # A norm that accepts 2-D inputs alone, but reshapes maps, is a mistake.
        reshaped = [problem for problem in problems if problem.startswith("changes the shape,")]
        if reshaped and {*first, *last} == {2}:
            raise UserError(f"norm._target_={target} does not fit: it {reshaped[0]}")
        with_positions = set(first) - {2}, set(last) - {2}
        if all(with_positions):
            channels_last = 4 in first and 4 in last and probe.pools_last_axis_alone()
        else:
            channels_last = not with_positions[0]
    return Layout(channels_last, tuple(last if channels_last else first))


@dataclass(frozen=True)
class _Probe:
    """Runs fresh norms, each on an input of another layout and number of dimensions."""

    build: Build
    num_features: int
    target: str

    def fresh(self) -> nn.Module:
        """Returns a norm in training mode, with the same initial values each time."""
        torch.default_generator.manual_seed(0)
        return self.build(self.num_features).train()

    def input(self, num_dims: int, *, channels_last: bool) -> Tensor:
        """Returns a random input whose sizes are all distinct."""
        sizes = [size for size in (4, 5, 6, 7, 8) if size != self.num_features][: num_dims - 1]
        sizes.insert(len(sizes) if channels_last else 1, self.num_features)
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0))

    def accepted_dims(self, on_warning: Any) -> tuple[list[int], list[int], list[str]]:
        """Returns the accepted numbers of dimensions, channels first and last, and the problems."""
        accepted: tuple[list[int], list[int]] = ([], [])
        problems = []
        for num_dims in PROBED_DIMS:
            for channels_last in (False, True):
                x = self.input(num_dims, channels_last=channels_last)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    warnings.simplefilter(on_warning, UserWarning)
                    problem = self.find_problem(x)
                if problem is None:
                    accepted[channels_last].append(num_dims)
                else:
                    problems.append(problem)
        return *accepted, problems

    def find_problem(self, x: Tensor) -> str | None:
        """Returns why a fresh norm does not take `x`; raises what no other input would fix."""
        norm = self.fresh()
        with self._no_new_parameters(norm):
            buffers = {name: buffer.shape for name, buffer in norm.named_buffers()}
            try:
                out = norm(x)
                again = [norm.eval()(x) for _ in range(2)]
            except Exception as error:
                return f"fails on an input of shape {tuple(x.shape)}: {first_line(error)}"
        if not isinstance(out, Tensor):
            raise UserError(
                f"norm._target_={self.target} returns a {type(out).__name__}, not a tensor"
            )
        if out.shape != x.shape:
            return f"changes the shape, {tuple(x.shape)} to {tuple(out.shape)}"
        if buffers != {name: buffer.shape for name, buffer in norm.named_buffers()}:
            return f"changes the shape of its buffers on an input of shape {tuple(x.shape)}"
        if not torch.allclose(again[0], again[1], rtol=0, atol=0, equal_nan=True):
            raise UserError(
                f"norm._target_={self.target} is not deterministic: in evaluation mode two "
                "forwards of one input differ"
            )
        return None

    @contextmanager
    def _no_new_parameters(self, norm: nn.Module) -> Iterator[None]:
        before = dict(norm.named_parameters())
        new = [name for name, parameter in before.items() if is_lazy(parameter)]
        if not new:
            yield
            new = [name for name, p in norm.named_parameters() if p is not before.get(name)]
        if new:
            raise UserError(
                f"norm._target_={self.target} creates its parameter {new[0]} in its first forward, "
                "too late for the optimizer; create it in __init__"
            )

    def pools_last_axis_alone(self) -> bool:
        """True if a value of a 4-D input influences others along the last axis alone."""
        x = self.input(4, channels_last=False)
        moved = x.clone()
        moved[0, 0, 0, 0] += 1
        changed = self.fresh()(x) != self.fresh()(moved)
        others = changed[0, 1:, 0, 0].any() or changed[0, 0, 1:, 0].any()
        return bool(changed[0, 0, 0, 1:].any()) and not bool(others)


# Argument names for the number of features, the least ambiguous first.
FEATURE_NAMES = (
    *("num_features", "num_channels", "n_features", "n_channels", "channels", "features"),
    *("normalized_shape", "normalized_dim", "hidden_size", "hidden_dim", "d_model", "embed_dim"),
    *("in_features", "in_channels", "width", "dim", "size"),
)
AMBIGUOUS_NAMES = ("width", "dim", "size")  # with a default, these may be an axis or a window
EPS_NAMES = ("eps", "epsilon", "variance_epsilon")


def foreign_factory(make: Callable[..., Any], *, target: str, eps: float) -> Build:
    """Returns a function that builds a foreign norm as (N, C, *) -> same.

    Args:
        make: a class or partial that returns an nn.Module, with the user's knobs bound.
        target: its name, for messages.
        eps: passed if the signature has one and the user has not set it.

    Raises:
        UserError: as `adapt`; when the first norm is built, as `find_layout`, or because the norm
            does not return its input's dtype or keeps state outside its state_dict.
    """
    build = adapt(make, target=target, eps=eps)
    layout: Layout | None = None

    def norm(num_features: int) -> nn.Module:
        nonlocal layout
        if layout is None:
            found = find_layout(build, num_features, target=target)
            _refuse_faults(lambda: found.present(build(num_features)), num_features, target)
            layout = found
            logger.info("norm._target_=%s takes %s", target, layout)
            if 2 not in layout.num_dims:
                logger.info("norm.view=token shows it one token at a time; sequence, whole texts")
        return layout.present(build(num_features))

    return norm


def _refuse_faults(fresh: Callable[[], nn.Module], num_features: int, target: str) -> None:
    """Raises UserError for faults that would otherwise show up far from their cause.

    Args:
        fresh: returns a new norm, each time with the same initial values.
    """
    x = torch.randn((4, num_features, 5), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            torch.default_generator.manual_seed(0)
            norm = fresh().train()
            out = norm(x)
            torch.default_generator.manual_seed(0)
            twin = fresh()
            twin.load_state_dict(norm.state_dict())
            kept = unlike_attributes(norm, twin)
            outs = [module.eval()(1 + 2 * x.flip(0)) for module in (norm, twin)]
        except Exception:  # any kind, from foreign code; the network's probes will name the site
            return
    if out.dtype != x.dtype:
        raise UserError(
            f"norm._target_={target} returns {out.dtype} for an input of {x.dtype}; "
            "end its forward with .to(x.dtype)"
        )
    if not torch.allclose(*outs, rtol=1e-4, atol=1e-6, equal_nan=True):
        kept += sorted(set(dict(norm.named_buffers())) - set(norm.state_dict()))
        names = ", ".join(name.removeprefix("norm.") for name in kept) or "an attribute"
        raise UserError(
            f"norm._target_={target} keeps state that its state_dict lacks: {names}; evaluation "
            "depends on it, but saved weights would not contain it; make it a persistent buffer "
            "in __init__, with self.register_buffer(...)"
        )


def unlike_attributes(norm: nn.Module, other: nn.Module) -> list[str]:
    """Returns the paths of plain attributes, tensors or numbers, that differ between two norms."""
    internal = vars(nn.Module())
    twins = dict(other.named_modules())
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in norm.named_modules()
        for name, value in vars(module).items()
        if name not in internal and _differ(value, vars(twins[path]).get(name))
    ]


def _differ(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return not torch.equal(value, other)
    if isinstance(value, Tensor) or isinstance(
        other, Tensor
    ):  # the state may have been a number at first
        return True
    return isinstance(value, int | float) and value != other


def adapt(make: Callable[..., Any], *, target: str, eps: float | None) -> Build:
    """Returns `make` as a function of the number of features alone.

    Raises:
        UserError: a knob that the target does not have, or a required argument that is not set;
            when called, an error of the constructor, or a result that is not an nn.Module.
    """
    function, args, knobs = _unwrap(bind_eps(make, eps))
    free = _free_arguments(function, args, knobs)
    feature = _feature_argument(free)
    missing = [p.name for p in free if p is not feature and _is_required(p)]
    if missing:
        raise UserError(
            f"norm._target_={target} needs the argument {missing[0]}; set norm.{missing[0]}=..."
        )

    def build(num_features: int) -> nn.Module:
        given, named = args, dict(knobs)
        if feature is not None and feature.kind in (
            feature.POSITIONAL_ONLY,
            feature.VAR_POSITIONAL,
        ):
            given = (*args, num_features)
        elif feature is not None:
            named[feature.name] = num_features
        try:
            norm = function(*given, **named)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"norm._target_={target} cannot be built for {num_features} features: "
                f"{first_line(error)}"
            ) from error
        if not isinstance(norm, nn.Module):
            raise UserError(
                f"norm._target_={target} made a {type(norm).__name__}, not an nn.Module"
            )
        return norm

    return build


def bind_eps(make: Callable[..., Any], eps: float | None) -> Callable[..., Any]:
    """Returns `make` with `eps` bound under its name in the signature, unless it is set."""
    free = _free_arguments(*_unwrap(make))
    names = [p.name for p in free if p.name in EPS_NAMES and p.kind is not p.POSITIONAL_ONLY]
    return make if eps is None or not names else partial(make, **{names[0]: eps})


def _unwrap(make: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns the function inside nested partials, and all arguments that they bind."""
    args: tuple[Any, ...] = ()
    knobs: dict[str, Any] = {}
    while isinstance(make, partial):
        args, knobs = (*make.args, *args), {**make.keywords, **knobs}
        make = make.func
    return make, args, knobs


def _free_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], knobs: dict[str, Any]
) -> list[inspect.Parameter]:
    """Returns the arguments of `function` that are not bound yet."""
    if getattr(function, "__init__", None) is nn.Module.__init__:
        return []  # takes no arguments, despite its signature
    try:
        signature = inspect.signature(function)
    except TypeError as error:
        raise UserError(f"norm._target_ names {function!r}, which cannot be called") from error
    except ValueError:  # written in C, without a signature: assume one positional argument
        return [inspect.Parameter("num_features", inspect.Parameter.POSITIONAL_ONLY)]
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in knobs if name not in parameters]
    if unknown:
        name = f"{function.__module__}.{function.__qualname__}"
        raise UserError(
            f"norm.{unknown[0]}: {name} has no such argument; it has {', '.join(parameters)}"
        )
    bound = signature.bind_partial(*args, **knobs).arguments
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
    choices = [*known(required), *positional, *known(optional), *rest]
    return choices[0] if choices else None


def _is_required(argument: inspect.Parameter) -> bool:
    variadic = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    return argument.default is argument.empty and not variadic
