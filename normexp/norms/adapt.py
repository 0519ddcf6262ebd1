"""Adapts norms from outside this package to a function of the number of features.

The number of features goes to the argument that is named for it. A required argument of another
name gets it only if the norm then takes inputs of that many channels and no others. eps has one
value for all norms, unless the user gives this one its own. How the norm takes its input is found
in norms/layout.py.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from normexp.errors import UserError, first_line
from normexp.norms.layout import Build, Layout, Probe, find_layout

logger = logging.getLogger(__name__)

# Argument names for the number of features, the least ambiguous first.
FEATURE_NAMES = (
    *("num_features", "num_channels", "n_features", "n_channels", "channels", "features"),
    *("normalized_shape", "normalized_dim", "hidden_size", "hidden_dim", "d_model", "embed_dim"),
    *("in_features", "in_channels", "width", "dim"),
)
KNOWN_NAMES = (*FEATURE_NAMES, "_")  # an argument named _ is ignored
AMBIGUOUS_NAMES = ("width", "dim")  # with a default, these may be an axis or a window
EPS_NAMES = ("eps", "epsilon", "variance_epsilon")
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


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
    log_replaced_eps(make, eps, target=target)
    layout: Layout | None = None

    def norm(num_features: int) -> nn.Module:
        nonlocal layout
        if layout is None:
            layout = find_layout(build, num_features, target=target)
            logger.info("norm._target_=%s takes %s", target, layout)
            if 2 not in layout.num_dims:
                logger.info("norm.view=token shows it one token at a time; sequence, whole texts")
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
    missing = [p.name for p in free if p is not feature and _is_required(p)]
    if missing:
        raise UserError(_needs(target, missing[0]))
    is_guess = feature is not None and _is_required(feature) and feature.name not in KNOWN_NAMES

    def construct(num_features: int) -> nn.Module:
        by_place, by_name = (), {}
        if feature is not None and feature.kind in BY_PLACE:
            by_place = (num_features,)
        elif feature is not None:
            by_name = {feature.name: num_features}
        try:
            norm = call(*by_place, **by_name)
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

    def build(num_features: int) -> nn.Module:
        nonlocal is_guess
        if is_guess and feature is not None:
            is_guess = False
            _refuse_wrong_guess(construct, num_features, feature.name, target)
        return construct(num_features)

    return build


def _refuse_wrong_guess(build: Build, num_features: int, argument: str, target: str) -> None:
    """Raises UserError unless a norm built for `num_features` takes that many channels alone."""
    hint = f"{_needs(target, argument)}, or call it num_features if that is what it is"
    try:
        layout = find_layout(build, num_features, target=target)
    except UserError as error:
        raise UserError(f"{hint} ({argument}={num_features}: {error})") from error
    probe = Probe(build, num_features, target)
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


def log_replaced_eps(make: Callable[..., Any], eps: float, *, target: str) -> None:
    """Logs that the eps of all norms replaces a norm's own default."""
    argument = _eps_argument(make)
    if argument is not None and isinstance(argument.default, float) and argument.default != eps:
        key, default = f"norm.{argument.name}", argument.default
        logger.info(
            "%s=%s replaces the default %s of %s; %s=%s keeps it",
            *(key, eps, default, target, key, default),
        )


def _eps_argument(make: Callable[..., Any]) -> inspect.Parameter | None:
    if not callable(make):
        raise UserError(f"norm._target_ names {make!r}, which cannot be called")
    free = _free_arguments(_flatten(make))
    named = [p for p in free if p.name in EPS_NAMES and p.kind is not p.POSITIONAL_ONLY]
    return named[0] if named else None


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
    choices = [*known(required), *positional, *known(optional), *rest]
    return choices[0] if choices else None


def _is_required(argument: inspect.Parameter) -> bool:
    variadic = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    return argument.default is argument.empty and not variadic
