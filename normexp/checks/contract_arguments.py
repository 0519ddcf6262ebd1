"""Contract: no argument of a norm is swallowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from normexp.checks.card import PASSED, Checks, Finding, failed, skipped
from normexp.checks.subject import Shape, Subject, arguments_of, values
from normexp.norms.adapt import FEATURE_NAMES

# How a norm computes, and not what; and the length of the data's texts.
OF_NO_EFFECT = ("inplace", "device", "dtype", "num_positions")
NO_ARGUMENT = "no_such_argument"
STEPS = 20  # past the warm-up of a norm with a short one
Knobs = dict[str, Any]


def uses_arguments(subject: Subject) -> Finding:
    """Another value of each flag and number shows: in parameters, outputs, state, or a refusal.

    Tried alone and beside another value of each other one: a momentum counts only where averages
    run, a bound only when a warm-up is over. And a name that is no argument is refused.
    """
    if _takes_any_name(subject):
        return failed(f"{NO_ARGUMENT}=1 is taken: a misspelt argument would not be noticed")
    if all(_observe(subject, shape, {}) is None for shape in _observed(subject)):
        return skipped("cannot be copied or run in float64")
    defaults = _numbers_and_flags(subject)
    bases: list[Knobs] = [{}]
    bases += [{name: other} for name, value in defaults.items() for other in _others(value)]
    swallowed = [
        name
        for name, value in defaults.items()
        if not any(_has_effect(subject, name, value, base) for base in bases)
    ]
    if swallowed:
        others = f"{swallowed[0]}={_others(defaults[swallowed[0]])[0]}"
        return failed(f"{', '.join(swallowed)}: another value changes nothing, as {others}")
    return PASSED


def _takes_any_name(subject: Subject) -> bool:
    parameters = arguments_of(subject.make).values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return False
    try:
        subject.bare(subject.smallest, **{NO_ARGUMENT: 1})
    except Exception:  # of foreign code, any kind
        return False
    return True


def _observed(subject: Subject) -> list[Shape]:
    return list(dict.fromkeys((subject.smallest, subject.largest)))


def _numbers_and_flags(subject: Subject) -> Knobs:
    """The arguments with such a value, the user's or the default."""
    return {
        name: argument.default
        for name, argument in arguments_of(subject.make).items()
        if isinstance(argument.default, bool | int | float)
        and name not in (*FEATURE_NAMES, *OF_NO_EFFECT)
    }


def _others(value: bool | int | float) -> list[Any]:
    """Values to try: far enough to show, near enough to be allowed."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (1, 2, 2 * value) if other != value]
    return [other for other in (value / 2, 2 * value, value / 100, 1.0) if other != value]


def _has_effect(subject: Subject, name: str, value: Any, base: Knobs) -> bool:
    if name in base:
        return False
    for shape in _observed(subject):
        before = _observe(subject, shape, base)
        if before is None:
            continue
        for other in _others(value):
            after = _observe(subject, shape, {**base, name: other})
            if after is None or not _equal(before, after):
                return True
    return False


def _observe(subject: Subject, shape: Shape, knobs: Knobs) -> list[tuple[str, Tensor]] | None:
    """All that can be seen of a norm over a few steps; None where it refuses."""
    try:
        norm = subject.norm(shape, torch.float64, **knobs)
        seen = [(name, value.clone()) for name, value in norm.state_dict().items()]
        seen += [(name, p.detach().clone()) for name, p in norm.named_parameters()]
        with torch.no_grad():
            for seed in range(STEPS):
                # Of two sizes, so that a bound on either side is met.
                seen.append(("training", norm(2 + 4 ** (seed % 3 - 1) * _input(shape, seed))))
            seen += [(name, buffer.clone()) for name, buffer in norm.named_buffers()]
            seen.append(("evaluation", norm.eval()(_input(shape, STEPS))))
    except Exception:  # of foreign code, any kind
        return None
    seen += _gradients(subject, shape, knobs)
    return seen


def _input(shape: Shape, seed: int) -> Tensor:
    return values(shape, torch.float64, seed)


def _gradients(subject: Subject, shape: Shape, knobs: Knobs) -> Iterator[tuple[str, Tensor]]:
    """What an argument of the backward alone changes."""
    norm = subject.trained(shape, torch.float64, **knobs)
    x = _input(shape, 0).requires_grad_()
    out = norm(x)
    if out.requires_grad:
        (out * _input(shape, 1)).sum().backward()
    for name, tensor in (("input", x), *norm.named_parameters()):
        if tensor.grad is not None:
            yield name, tensor.grad


def _equal(before: list[tuple[str, Tensor]], after: list[tuple[str, Tensor]]) -> bool:
    if [name for name, _ in before] != [name for name, _ in after]:
        return False
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))


ARGUMENTS: Checks = {"no argument swallowed": uses_arguments}
