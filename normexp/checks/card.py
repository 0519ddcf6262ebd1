"""The card of a norm: what was measured of it from outside, a line each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from normexp.checks.probing import first_line
from normexp.checks.subject import Subject, seed_draws

Section = Literal["contract", "traits", "compatibility", "cost"]
Status = Literal["pass", "fail", "value", "skipped"]
Value = str | float | int


@dataclass(frozen=True)
class Finding:
    """What one check came to.

    Attributes:
        value: what was measured, where the status is `value`.
        detail: the smallest input that shows it, or the reason.
    """

    status: Status
    value: Value | None = None
    detail: str = ""


PASSED = Finding("pass")
Check = Callable[[Subject], Finding]
Checks = Mapping[str, Check]


def failed(detail: str) -> Finding:
    return Finding("fail", detail=detail)


def measured(value: Value, detail: str = "") -> Finding:
    return Finding("value", value, detail)


def skipped(reason: str) -> Finding:
    return Finding("skipped", detail=reason)


@dataclass(frozen=True)
class Line:
    """A finding with its place on the card."""

    section: Section
    name: str
    status: Status
    value: Value | None = None
    detail: str = ""


@dataclass(frozen=True)
class Card:
    """The lines of one norm.

    Attributes:
        name: as the user calls it.
        target: what was built.
        num_features: channels of the inputs it was measured on.
        takes: where it wants its channels, and the numbers of dimensions it takes by itself.
    """

    name: str
    target: str
    num_features: int
    takes: str
    lines: tuple[Line, ...]

    @property
    def failures(self) -> list[Line]:
        """The lines of the contract that failed."""
        return [line for line in self.lines if line.section == "contract" and line.status == "fail"]


def run_checks(section: Section, checks: Checks, subject: Subject) -> list[Line]:
    """Runs checks by themselves: what one of them raises is its own failure.

    Every check starts from the same random state, and leaves the caller's as it was.
    """
    lines = []
    for name, check in checks.items():
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_draws()
            try:
                finding = check(subject)
            except Exception as error:  # of foreign code, any kind
                finding = failed(f"{type(error).__name__}: {first_line(error)}")
        lines.append(Line(section, name, finding.status, finding.value, finding.detail))
    return lines
