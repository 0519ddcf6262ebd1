"""The whole card: contract, traits, compatibility and cost of one norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from normexp.checks.card import Card, Line, run_checks
from normexp.checks.card_invariance import INVARIANCE
from normexp.checks.card_traits import DEPENDS_ON
from normexp.checks.compatibility import COMPATIBILITY, with_ddp
from normexp.checks.contract import failure_to_build, measure_contract
from normexp.checks.cost import COST
from normexp.checks.subject import Subject, open_subject
from normexp.errors import UserError
from normexp.norms.slots import Slots


def measure_card(
    make: Callable[..., Any],
    *,
    name: str,
    target: str,
    eps: float,
    slots: Slots,
    contract_only: bool = False,
    ddp: bool = False,
) -> Card:
    """Builds the norm that `make` makes, again and again, and measures every line.

    Args:
        make: a class or partial with the user's knobs bound.
        contract_only: leaves out traits, compatibility and cost.
        ddp: also trains it in two processes.

    Raises:
        UserError: not callable, an unknown knob, an argument that is not set, no nn.Module.
    """
    try:
        subject = open_subject(make, name=name, target=target, eps=eps, slots=slots)
    except UserError as error:
        line = failure_to_build(error)
        if line is None:
            raise
        return Card(name, target, 0, "no input", (line,))
    lines = measure_contract(subject)
    if not contract_only and subject.shapes:
        lines += _measure_rest(subject, ddp=ddp)
    return Card(name, target, subject.num_features, subject.takes, tuple(lines))


def _measure_rest(subject: Subject, *, ddp: bool) -> list[Line]:
    compatibility = {**COMPATIBILITY, "DDP, two processes": with_ddp(ddp)}
    return [
        *run_checks("traits", {**DEPENDS_ON, **INVARIANCE}, subject),
        *run_checks("compatibility", compatibility, subject),
        *run_checks("cost", COST, subject),
    ]
