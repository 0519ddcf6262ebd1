"""The contract of a norm: a table of checks, and an assertion for users' own tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import Tensor

from normexp.checks import agreement, behaviour
from normexp.checks.probe import MODES, fixed_draws
from normexp.checks.subject import (
    Check,
    Line,
    Subject,
    every,
    largest,
    open_subject,
    run_checks,
    skipped,
    smallest,
)
from normexp.errors import UserError
from normexp.norms.adapt import PROBED_DIMS

BUILT = "can be built"


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
    known = [BUILT, *(check.name for check in CONTRACT)]
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
    """A norm's subject (None if its constructor raises) and every line of its contract.

    The subject keeps the shapes for which outputs are finite; if none is left, the remaining lines
    are skipped.

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
    lines = [Line("contract", BUILT, "pass"), *run_checks("contract", INPUTS, subject)]
    with fixed_draws(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken = {s for s in subject.shapes for m in MODES if behaviour.finite(subject, s, m)}
    reason = "outputs are not finite" if subject.shapes else "no input is taken"
    subject = replace(subject, shapes=tuple(s for s in subject.shapes if s not in broken))
    if subject.shapes:
        return subject, lines + run_checks("contract", ON_SHAPES, subject)
    return subject, lines + [check.line("contract", skipped(reason)) for check in ON_SHAPES]


def _name_of(factory: Callable[..., Any]) -> str:
    """The import path of a class, of a partial's function, or of an object's class."""
    while isinstance(factory, partial):
        factory = factory.func
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}.{named.__qualname__}"


def _finite_on(name: str, transform: Callable[[Tensor], Tensor]) -> Check:
    return Check(name, partial(agreement.is_finite_on, transform), every, MODES)


INPUTS = (
    Check("an input is taken", behaviour.takes_an_input),
    *(Check(f"{n}-D inputs", partial(behaviour.takes_dims, n)) for n in PROBED_DIMS),
    Check("finite outputs", behaviour.finite, every, MODES),
)
ON_SHAPES = (
    Check("dtype kept", behaviour.keeps_dtype),
    Check("channels_last kept", behaviour.keeps_channels_last, behaviour.own_maps),
    Check("any strides", behaviour.takes_any_strides, every, MODES),
    Check("input unchanged", behaviour.leaves_input_alone, every, MODES),
    Check("parameters made at once", behaviour.makes_parameters_at_once),
    Check("gradient for every parameter", behaviour.reaches_parameters, largest),
    Check("no graph kept", behaviour.holds_no_graph, smallest),
    Check("buffers keep shape and dtype", behaviour.keeps_buffers, every, MODES),
    Check("state_dict round trip", behaviour.restores, every),
    Check("deterministic in evaluation", behaviour.is_deterministic, every),
    Check("evaluation changes no state", behaviour.keeps_state_in_evaluation, smallest),
    Check("running averages", behaviour.averages_as_torch, largest),
    Check("evaluation by averages", behaviour.evaluates_by_averages, every),
    Check("statistics wide in bfloat16", agreement.keeps_digits_in_half, every),
    Check("gradient in training", agreement.gradient_is_right, every, (True,)),
    Check("gradient in evaluation", agreement.gradient_is_right, every, (False,)),
    Check("exact at mean 1e4", agreement.keeps_digits_far_from_zero, every),
    _finite_on("finite on constants", lambda x: 0 * x + agreement.CONSTANT),
    _finite_on("finite at scale 1e-12", lambda x: 1e-12 * x),
    _finite_on("finite at scale 1e12", lambda x: 1e12 * x),
    Check("one sample", agreement.handles_few_values, agreement.one_sample, MODES),
    Check("one position", agreement.handles_few_values, agreement.one_position, MODES),
    Check("empty batch", agreement.handles_few_values, agreement.no_sample, MODES),
    Check("no argument swallowed", behaviour.uses_arguments),
)
CONTRACT = INPUTS + ON_SHAPES
