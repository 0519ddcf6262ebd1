"""A question, its answer, and how it is put to a norm by itself or to a network."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from normexp.checks.lone_norm import LoneNorm, Shape
from normexp.checks.network import BuiltNetwork
from normexp.checks.probe import MODES, fixed_draws
from normexp.checks.sites import explain
from normexp.errors import UserError
from normexp.records.sources import source_line_of

logger = logging.getLogger(__name__)

NO_INPUT = "no input that the norm takes can show this"
# What follows from an answer: for a norm by itself a line in a section of its card, ...
Section = Literal["contract", "traits", "compatibility", "cost"]
SECTIONS: tuple[Section, ...] = ("contract", "traits", "compatibility", "cost")
Consequence = Literal["trait", "note", "warning", "refusal"]  # ... and for a network


@dataclass(frozen=True)
class Answer:
    """A line of a card.

    Attributes:
        value: the measurement, if the status is `value`.
        detail: the smallest input that shows the result, or the reason.
    """

    section: str = ""
    name: str = ""
    status: Literal["pass", "fail", "value", "skipped"] = "pass"
    value: str | float | int | None = None
    detail: str = ""
    question: str = ""


def failed(detail: str) -> Answer:
    return Answer(status="fail", detail=detail)


def measured(value: str | float | int, detail: str = "") -> Answer:
    return Answer(status="value", value=value, detail=detail)


def skipped(reason: str) -> Answer:
    return Answer(status="skipped", detail=reason)


Reply = Answer | str | None  # a string names a fault, or what moves; None: nothing is wrong


@dataclass(frozen=True)
class Question:
    """A row of the table: a name, what to ask, of what, and what follows.

    Attributes:
        name: of the line on the card, or of the field of `Traits`.
        ask: the function that answers; the first line of its docstring is the question. About a
            norm it is called with the `LoneNorm` or, if `shapes` is set, with one `NormCase` per
            shape, followed by true for training and false for evaluation if `modes` is set. About
            a network it is called with the `BuiltNetwork`, and returns the value of a trait, else
            a message for the user or None.
        follows: a section of the card, or the consequence for a network.
        shapes: the inputs (N, C, *) of a norm to ask about.
        only_foreign: of a network whose modules are all torch's or ours, this is not asked.
        says: the answer over all shapes and modes. "fault": the first fault, else the first
            answer. "moves", "same": the modes in which something or nothing moves.
    """

    name: str
    ask: Callable[..., Any]
    follows: Section | Consequence
    shapes: Callable[[LoneNorm], Sequence[Shape]] | None = None
    modes: tuple[bool, ...] = ()
    says: Literal["fault", "moves", "same"] = "fault"
    only_foreign: bool = False

    def line(self, answer: Answer) -> Answer:
        """The answer as a line of a card."""
        function = self.ask.func if isinstance(self.ask, partial) else self.ask
        question = (function.__doc__ or "").partition("\n")[0]
        return replace(answer, section=self.follows, name=self.name, question=question)


def ask_norm(questions: Iterable[Question], norm: LoneNorm) -> list[Answer]:
    """Asks in order; an exception fails only the question that raised it.

    Every question starts from the same random state. The caller's is restored.
    """
    lines = []
    for question in questions:
        answer_of = _first_fault if question.says == "fault" else _modes_that_move
        with fixed_draws(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                answer = answer_of(question, norm)
            except Exception as error:  # of foreign code, any kind
                answer = failed(explain(error))
                if norm.shapes and not norm.takes_float64:  # the line "dtype kept" says so
                    answer = skipped("asks in float64, in which the norm fails")
        lines.append(question.line(answer))
    return lines


def _first_fault(question: Question, norm: LoneNorm) -> Answer:
    if question.shapes is None:
        reply: Reply = question.ask(norm)
        return failed(reply) if isinstance(reply, str) else reply or Answer()
    shapes, first = question.shapes(norm), None
    modes = [(training,) for training in question.modes] or [()]
    for shape, mode in itertools.product(shapes, modes):
        reply = question.ask(norm.at(shape), *mode)
        if isinstance(reply, str):
            return failed(", ".join([reply, *map(mode_name, mode), show(shape)]))
        first = first or reply
    return first or (Answer() if shapes else skipped(NO_INPUT))


def _modes_that_move(question: Question, norm: LoneNorm) -> Answer:
    """The value is "yes", "no" or a mode; the detail is the first shape where something moves."""
    assert question.shapes is not None
    shapes = question.shapes(norm)
    if not shapes:
        return skipped(NO_INPUT)
    shown: dict[bool, str] = {}
    for training in MODES:
        for shape in shapes:
            moved: Reply = question.ask(norm.at(shape), training)
            if isinstance(moved, Answer):
                return moved
            if moved and question.says == "same":
                shown[training] = f"it moves the {moved} {mode_name(training)}, {show(shape)}"
            elif moved:
                shown[training] = show(shape) if moved == "output" else f"{show(shape)}, {moved}"
            if moved:
                break
    modes = [mode for mode in MODES if (mode in shown) is (question.says == "moves")]
    value = mode_name(modes[0]) if len(modes) == 1 else "yes" if modes else "no"
    return measured(value, next(iter(shown.values()), ""))


def ask_network(questions: Iterable[Question], network: BuiltNetwork) -> dict[str, Any]:
    """Asks in order, and returns the traits by name.

    Raises:
        UserError: the message of the first refusal; or the user's code fails.
    """
    traits: dict[str, Any] = {}
    for question in questions:
        if question.only_foreign and not network.is_foreign:
            continue
        try:
            reply = network.once(question.ask)
        except Exception as error:
            if isinstance(error, UserError) or not source_line_of(error):
                raise  # a refusal, or a fault that is not of the user's code
            raise UserError(f"probing the model fails: {explain(error)}") from error
        if question.follows == "trait":
            traits[question.name] = reply
        elif reply is None:
            continue
        elif question.follows == "refusal":
            raise UserError(reply)
        else:
            level = logging.WARNING if question.follows == "warning" else logging.INFO
            logger.log(level, "%s", reply)
    return traits


def show(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def mode_name(training: bool) -> str:
    return "in training" if training else "in evaluation"
