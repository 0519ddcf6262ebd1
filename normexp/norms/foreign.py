"""Plugging in any norm: its arguments found by name, its layout by a probe at build time."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.layout import Build, Layout, find_layout, first_line

logger = logging.getLogger(__name__)

# Names under which constructors take the number of features, the surest first.
FEATURE_NAMES = (
    *("num_features", "num_channels", "n_features", "n_channels", "channels", "features"),
    *("normalized_shape", "normalized_dim", "hidden_size", "hidden_dim", "d_model", "embed_dim"),
    *("in_features", "in_channels", "width", "dim", "size"),
)
AMBIGUOUS_NAMES = ("width", "dim", "size")  # with a default they may be an axis or a window
EPS_NAMES = ("eps", "epsilon", "variance_epsilon")


def foreign_factory(make: Callable[..., Any], *, target: str, eps: float) -> Build:
    """Builds norms from the wild so that they map (N, C, *) to the same shape.

    Args:
        make: a class or partial that returns an nn.Module, with the user's knobs bound.
        target: its name, for messages.
        eps: passed where the signature has one and the user has not set it.

    Raises:
        UserError: as `adapt` and `find_layout`, for another dtype than the input's, or for state
            that its state_dict lacks; at the first norm that is built.
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
        return layout.present(build(num_features))

    return norm


def _refuse_faults(fresh: Callable[[], nn.Module], num_features: int, target: str) -> None:
    """Of norms as (N, C, *) -> same, alike when made: what would fail later, far from its cause."""
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
        except Exception:  # of foreign code, any kind: the probes of the network name the site
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
            "depends on it, and kept weights would not have it; make it a persistent buffer in "
            "__init__, with self.register_buffer(...)"
        )


def unlike_attributes(norm: nn.Module, other: nn.Module) -> list[str]:
    """Plain attributes, tensors or numbers, in which two norms of one class differ."""
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
    if isinstance(value, Tensor) or isinstance(other, Tensor):  # a state that began as a number
        return True
    return isinstance(value, int | float) and value != other


def adapt(make: Callable[..., Any], *, target: str, eps: float | None) -> Build:
    """`make` as a function of the number of features alone.

    Raises:
        UserError: a knob that the target does not have, a required argument that is not set, or,
            when called, an error of the constructor or something that is no nn.Module.
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
    """`make` with `eps` bound under the name that its signature has for it, unless it is set."""
    free = _free_arguments(*_unwrap(make))
    names = [p.name for p in free if p.name in EPS_NAMES and p.kind is not p.POSITIONAL_ONLY]
    return make if eps is None or not names else partial(make, **{names[0]: eps})


def _unwrap(make: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function inside nested partials, with all that they bind."""
    args: tuple[Any, ...] = ()
    knobs: dict[str, Any] = {}
    while isinstance(make, partial):
        args, knobs = (*make.args, *args), {**make.keywords, **knobs}
        make = make.func
    return make, args, knobs


def _free_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], knobs: dict[str, Any]
) -> list[inspect.Parameter]:
    """The arguments of `function` that are not bound yet."""
    if getattr(function, "__init__", None) is nn.Module.__init__:
        return []  # takes nothing, whatever its signature says
    try:
        signature = inspect.signature(function)
    except TypeError as error:
        raise UserError(f"norm._target_ names {function!r}, which cannot be called") from error
    except ValueError:  # written in C, without a signature: one positional argument it is
        return [inspect.Parameter("num_features", inspect.Parameter.POSITIONAL_ONLY)]
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in knobs if name not in parameters]
    if unknown:
        name = f"{function.__module__}.{function.__qualname__}"
        raise UserError(
            f"norm.{unknown[0]} is no argument of {name}; it has {', '.join(parameters)}"
        )
    bound = signature.bind_partial(*args, **knobs).arguments
    return [p for name, p in parameters.items() if name not in bound]


def _feature_argument(free: list[inspect.Parameter]) -> inspect.Parameter | None:
    """The argument that takes the number of features; None where a norm asks for none."""

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
