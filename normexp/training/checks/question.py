"""A question about a norm by itself, and its answer: a line of its card."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from normexp.errors import one_line
from normexp.training.checks.norm import LoneNorm, Shape, mode_name, show
from normexp.training.checks.probe import MODES, fixed_draws

Section = Literal["contract", "traits"]
ShapesOf = Callable[[LoneNorm], Sequence[Shape]]


@dataclass(frozen=True)
class Answer:
    """A line of a card.

    Attributes:
        value: the measurement, if the status is `value`.
        detail: an input that shows the result, or the reason.
        question: the question that the line answers, in words.
    """

    section: str = ""
    name: str = ""
    status: Literal["pass", "fail", "value", "skipped"] = "pass"
    value: str | float | int | None = None
    detail: str = ""
    question: str = ""


Reply = Answer | str | None  # a string names a fault, or a result that moves


def failed(fault: str) -> Answer:
    return Answer(status="fail", detail=fault)


def measured(value: str | float | int, detail: str = "") -> Answer:
    return Answer(status="value", value=value, detail=detail)


def skipped(reason: str) -> Answer:
    return Answer(status="skipped", detail=reason)


NO_INPUT = skipped("takes no input that can show this")


def every(norm: LoneNorm) -> Sequence[Shape]:
    return norm.shapes


@dataclass(frozen=True)
class Question(ABC):
    """A row about a norm by itself.

    Attributes:
        name: of its line on a card.
        text: the question in words.
        ask: finds the reply.
    """

    name: str
    text: str
    ask: Callable[..., Reply]
    section: Section = "contract"

    def answer(self, norm: LoneNorm) -> Answer:
        """The line of a card; an exception is a fault. Starts from a fixed random state."""
        with fixed_draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                answer = self._ask(norm)
            except Exception as error:  # of foreign code, any kind
                answer = failed(one_line(error))
                if norm.shapes and not norm.takes_float64:  # the line "dtype kept" says so
                    answer = skipped("asks in float64, in which the norm fails")
        if self.section == "traits" and answer.status == "fail":
            answer = skipped(answer.detail)
        return replace(answer, section=self.section, name=self.name, question=self.text)

    @abstractmethod
    def _ask(self, norm: LoneNorm) -> Answer: ...


class NormQuestion(Question):
    """Calls `ask(norm)` once; a string is a fault."""

    def _ask(self, norm: LoneNorm) -> Answer:
        reply = self.ask(norm)
        return failed(reply) if isinstance(reply, str) else reply or Answer()


@dataclass(frozen=True)
class InputQuestion(Question):
    """Calls `ask(case)` for each input; the first fault counts, else the first answer.

    Attributes:
        shapes: the inputs (N, C, *).
        modes: true for training, false for evaluation.
    """

    shapes: ShapesOf = every
    modes: tuple[bool, ...] = (True,)

    def _ask(self, norm: LoneNorm) -> Answer:
        shapes = self.shapes(norm)
        if not shapes:
            return NO_INPUT
        first: Answer | None = None
        for shape in shapes:
            for training in self.modes:
                case = norm.at(shape, training)
                reply = self.ask(case)
                if isinstance(reply, str):
                    mode = [case.mode] if len(self.modes) > 1 else []
                    return failed(", ".join([reply, *mode, show(shape)]))
                first = first or reply
        return first or Answer()


@dataclass(frozen=True)
class ModeQuestion(Question):
    """Finds the modes in which a change that `ask(case)` makes moves a result, which it names.

    Attributes:
        shapes: the inputs (N, C, *).
        wants_still: the line names the modes in which nothing moves.
    """

    section: Section = "traits"
    shapes: ShapesOf = every
    wants_still: bool = False

    def _ask(self, norm: LoneNorm) -> Answer:
        """The value is "yes", "no" or one mode; the detail is the first input that shows it."""
        shapes = self.shapes(norm)
        if not shapes:
            return NO_INPUT
        moved: dict[bool, str] = {}  # by mode
        for training in MODES:
            for shape in shapes:
                case = norm.at(shape, training)
                reply = self.ask(case)
                if isinstance(reply, Answer):
                    return reply
                if reply:
                    moved[training] = f"moves the {reply} {case.mode}, {show(shape)}"
                    break
        modes = [mode for mode in MODES if (mode in moved) is not self.wants_still]
        if not modes:
            value = "no"
        elif len(modes) == 1:
            value = mode_name(modes[0])
        else:
            value = "yes"
        return measured(value, next(iter(moved.values()), ""))
