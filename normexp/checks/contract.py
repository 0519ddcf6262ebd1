"""The contract of a norm, all of it, and as an assertion for the tests of somebody's own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any

from normexp.checks.card import Checks, Line, run_checks
from normexp.checks.contract_arguments import ARGUMENTS
from normexp.checks.contract_numerics import NUMERICS
from normexp.checks.contract_shapes import FORMATS, SHAPES
from normexp.checks.contract_state import STATE
from normexp.checks.subject import Subject, open_subject
from normexp.errors import UserError

ON_SHAPES: Checks = {**FORMATS, **STATE, **NUMERICS, **ARGUMENTS}
BUILT = "can be built"


def measure_contract(subject: Subject) -> list[Line]:
    """Every line of the contract; those that need an input are skipped where none is taken."""
    lines = [Line("contract", BUILT, "pass"), *run_checks("contract", SHAPES, subject)]
    if subject.shapes:
        return lines + run_checks("contract", ON_SHAPES, subject)
    return lines + [
        Line("contract", name, "skipped", detail="no input is taken") for name in ON_SHAPES
    ]


def failure_to_build(error: UserError) -> Line | None:
    """The line of a constructor that raises; None for a mistake in what it was asked for."""
    cause = error.__cause__
    if cause is None or isinstance(cause, TypeError | UserError):
        return None
    return Line("contract", BUILT, "fail", detail=str(error))


def assert_contract(
    factory: Callable[..., Any],
    num_features: int | None = None,
    *,
    eps: float | None = None,
    except_for: Collection[str] = (),
) -> None:
    """Raises AssertionError with a line for each failed one of the contract of a norm.

    Args:
        factory: an nn.Module class, a partial of one, or a `NormFactory`; what it takes the number
            of features as is found by name.
        num_features: channels of the inputs; by default the fewest that suit it.
        eps: passed where the signature has one and nothing has set it.
        except_for: names of lines that may fail, as `("exact at mean 1e4",)`.

    Raises:
        UserError: an argument that is not set, something that makes no nn.Module, or a name in
            `except_for` that no line has.
    """
    waived = {except_for} if isinstance(except_for, str) else set(except_for)
    _check_names(waived)
    target = name_of(factory)
    failures = [
        f"  {line.name}: {line.detail}"
        for line in _lines_of(factory, target, num_features, eps)
        if line.status == "fail" and line.name not in waived
    ]
    if failures:
        raise AssertionError("\n".join([f"{target} breaks the contract:", *failures]))


def _check_names(waived: set[str]) -> None:
    known = [BUILT, *SHAPES, *ON_SHAPES]
    for name in sorted(waived.difference(known)):
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UserError(f"except_for: the contract has no line {name!r}; {hint}")


def _lines_of(
    factory: Callable[..., Any], target: str, num_features: int | None, eps: float | None
) -> list[Line]:
    try:
        subject = open_subject(
            factory, name=target, target=target, eps=eps, num_features=num_features
        )
    except UserError as error:
        line = failure_to_build(error)
        if line is None:
            raise
        return [line]
    return measure_contract(subject)


def name_of(factory: Callable[..., Any]) -> str:
    """The import path of a class, of what a partial calls, or of an object's class."""
    while hasattr(factory, "func"):
        factory = factory.func  # type: ignore[attr-defined]
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}.{named.__qualname__}"
