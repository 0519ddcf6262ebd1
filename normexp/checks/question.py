"""A question about a norm by itself, and its answer: a line of its card."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from normexp.checks.network import explain
from normexp.checks.norm import LoneNorm, Shape, mode_name, show
from normexp.checks.probe import MODES, fixed_draws


@dataclass(frozen=True)
class Answer:
    """A line of a card.

    Attributes:
        value: the measurement, if the status is `value`.
        detail: an input that shows the result, or the reason.
        question: that the line answers.
    """

    section: str = ""
    name: str = ""
    status: Literal["pass", "fail", "value", "skipped"] = "pass"
    value: str | float | int | None = None
    detail: str = ""
    question: str = ""


def measured(value: str | float | int, detail: str = "") -> Answer:
    return Answer(status="value", value=value, detail=detail)


def skipped(reason: str) -> Answer:
    return Answer(status="skipped", detail=reason)


Reply = Answer | str | None  # a string names a fault, or what moves; None: nothing is wrong


@dataclass(frozen=True)
class Question:
    """A row about a norm by itself: a line of its card.

    Attributes:
        ask: answers; the first line of its docstring is the question. It is called with the
            `LoneNorm` or, if `shapes` is set, with one `NormCase` per shape, followed by true for
            training and false for evaluation if `modes` is set.
        shapes: the inputs (N, C, *) to ask about.
        says: the answer over all shapes and modes. "fault": the first fault, else the first
            answer. "moves", "same": the modes in which something or nothing moves.
    """

    name: str
    ask: Callable[..., Any]
    section: Literal["contract", "traits"] = "contract"
    shapes: Callable[[LoneNorm], Sequence[Shape]] | None = None
    modes: tuple[bool, ...] = ()
    says: Literal["fault", "moves", "same"] = "fault"

    def answer(self, norm: LoneNorm) -> Answer:
        """The line of a card; an exception is a fault. Starts from a fixed random state."""
        function = self.ask.func if isinstance(self.ask, partial) else self.ask
        question = (function.__doc__ or "").partition("\n")[0]
        with fixed_draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = (self._modes if self.says in ("moves", "same") else self._first)(norm)
            except Exception as error:  # of foreign code, any kind
                found = Answer(status="fail", detail=explain(error))
                if norm.shapes and not norm.takes_float64:  # the line "dtype kept" says so
                    found = skipped("asks in float64, in which the norm fails")
        if self.section == "traits" and found.status == "fail":
            found = skipped(found.detail)
        return replace(found, section=self.section, name=self.name, question=question)

    def _first(self, norm: LoneNorm) -> Answer:
        if self.shapes is None:
            reply: Reply = self.ask(norm)
            fault = Answer(status="fail", detail=str(reply))
            return fault if isinstance(reply, str) else reply or Answer()
        shapes, first = self.shapes(norm), None
        modes = [(training,) for training in self.modes] or [()]
        for shape, mode in itertools.product(shapes, modes):
            reply = self.ask(norm.at(shape), *mode)
            if isinstance(reply, str):
                said = ", ".join([reply, *map(mode_name, mode), show(shape)])
                return Answer(status="fail", detail=said)
            first = first or reply
        return first or (Answer() if shapes else skipped("takes no input that can show this"))

    def _modes(self, norm: LoneNorm) -> Answer:
        """The value is "yes", "no" or a mode; the detail is where it moves."""
        assert self.shapes is not None
        shown: dict[bool, str] = {}
        for training, shape in itertools.product(MODES, self.shapes(norm)):
            reply: Reply = None if training in shown else self.ask(norm.at(shape), training)
            if isinstance(reply, Answer):
                return reply
            if reply:
                shown[training] = f"moves the {reply} {mode_name(training)}, {show(shape)}"
        if not self.shapes(norm):
            return skipped("takes no input that can show this")
        modes = [mode for mode in MODES if (mode in shown) is (self.says == "moves")]
        value = mode_name(modes[0]) if len(modes) == 1 else "yes" if modes else "no"
        return measured(value, next(iter(shown.values()), ""))
