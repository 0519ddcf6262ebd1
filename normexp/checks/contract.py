"""The contract of a norm, and an assertion for users' own tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import nn

from normexp.checks.asking import Answer, Section, ask_norm, skipped
from normexp.checks.behaviour import finite
from normexp.checks.lone_norm import LoneNorm, open_norm
from normexp.checks.probe import MODES, fixed_draws
from normexp.checks.questions import CONTRACT, INPUTS, OF_NORMS
from normexp.errors import UserError

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
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(f"factory={factory!r}: must be a class, as in assert_contract(MyNorm)")
    waived = {except_for} if isinstance(except_for, str) else set(except_for)
    known = [BUILT, *(question.name for question in CONTRACT)]
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


def open_and_measure(
    make: Callable[..., Any],
    sections: Collection[Section] = ("contract",),
    also: Collection[str] = (),
    **known: Any,
) -> tuple[LoneNorm | None, list[Answer]]:
    """A norm (None if its constructor raises) and its answers to the questions of `sections`.

    And to those that `also` names.

    The norm keeps the shapes for which outputs are finite; if none is left, the rest of the
    contract is skipped and other sections are left out.

    Raises:
        UserError: a user's mistake, see `open_norm`.
    """
    try:
        norm = open_norm(make, **known)
    except UserError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, TypeError | UserError):
            raise
        return None, [Answer("contract", BUILT, "fail", detail=str(error))]
    lines = [Answer("contract", BUILT), *ask_norm(INPUTS, norm)]
    with fixed_draws(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken = {s for s in norm.shapes for mode in MODES if finite(norm.at(s), mode)}
    reason = "outputs are not finite" if norm.shapes else "no input is taken"
    norm = replace(norm, shapes=tuple(s for s in norm.shapes if s not in broken))
    if norm.shapes:
        asked = [q for q in OF_NORMS if q.follows in sections or q.name in also]
        return norm, lines + ask_norm(asked, norm)
    rest = [q for q in OF_NORMS if q.follows == "contract"]
    return norm, lines + [question.line(skipped(reason)) for question in rest]


def _name_of(factory: Callable[..., Any]) -> str:
    """The import path of a class, of a partial's function, or of an object's class."""
    while isinstance(factory, partial):
        factory = factory.func
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}.{named.__qualname__}"
