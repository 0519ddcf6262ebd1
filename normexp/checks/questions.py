"""The table of questions. A card, the contract and the preflight of a network are selections of it.

A new question is one row.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from normexp.checks import contract, reading, traits, wiring
from normexp.checks.network import BuiltNetwork, explain
from normexp.checks.norm import Answer, LoneNorm, Reply, Shape, measured, mode_name, show, skipped
from normexp.checks.probe import MODES, fixed_draws

Section = Literal["contract", "traits"]


@dataclass(frozen=True)
class Question:
    """A row about a norm by itself: a line of its card.

    Attributes:
        ask: answers; the first line of its docstring is the question. It is called with the
            `LoneNorm` or, if `shapes` is set, with one `NormCase` per shape, followed by true for
            training and false for evaluation if `modes` is set.
        shapes: the inputs (N, C, *) to ask about.
        says: the answer over all shapes and modes. "fault": the first fault, else the first
            answer. "works": the same, as yes or no. "moves", "same": the modes in which something
            or nothing moves.
    """

    name: str
    ask: Callable[..., Any]
    section: Section = "contract"
    shapes: Callable[[LoneNorm], Sequence[Shape]] | None = None
    modes: tuple[bool, ...] = ()
    says: Literal["fault", "works", "moves", "same"] = "fault"

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
        if self.says == "works" and found.status in ("pass", "fail"):
            found = measured("yes" if found.status == "pass" else "no", found.detail)
        elif self.section == "traits" and found.status == "fail":
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


def every(norm: LoneNorm) -> list[Shape]:
    return list(norm.shapes)


def smallest(norm: LoneNorm) -> list[Shape]:
    return list(norm.shapes[:1])


def largest(norm: LoneNorm) -> list[Shape]:
    return list(norm.shapes[-1:])


trait = partial(Question, section="traits")
moves = partial(trait, says="moves")
same = partial(trait, says="same", shapes=every)
works = partial(trait, says="works")

BUILT = "can be built"  # answered by opening the norm
OF_NORMS = (
    Question("parameters made at once", contract.makes_parameters_at_once),
    Question("shape kept", contract.keeps_shape),
    Question("finite", contract.is_finite, shapes=every, modes=MODES),
    Question("dtype kept", contract.keeps_dtype),
    Question("gradient for every parameter", contract.reaches_parameters, shapes=largest),
    Question("gradient", contract.gradient_is_right, shapes=every, modes=MODES),
    Question("buffers saved", contract.saves_state, shapes=every),
    Question("deterministic in evaluation", contract.is_deterministic, shapes=every),
    Question("statistics wide in bfloat16", contract.keeps_digits_in_half, shapes=every),
    moves("mixes samples", traits.mixes_samples, shapes=every),
    moves("pools channels", traits.pools_channels, shapes=every),
    moves("pools positions", traits.pools_positions, shapes=traits.with_positions),
    moves("reads the future", traits.reads_future, shapes=traits.texts),
    moves("reads padding", traits.reads_masked, shapes=traits.padded_text),
    same("ignores input scale", partial(traits.changes_output, traits.SCALES)),
    same("ignores input shift", partial(traits.changes_output, traits.SHIFTS)),
    trait("running state", traits.has_running_state, shapes=largest),
    trait("bytes kept for backward", traits.bytes_kept),
    works("replicas under vmap", traits.stacks, shapes=every),
    works("ghost = accumulated", traits.splits, shapes=traits.batch_to_split),
)
CONTRACT = (BUILT, *(question.name for question in OF_NORMS if question.section == "contract"))


@dataclass(frozen=True)
class NetworkQuestion:
    """A row about a network before its training.

    Attributes:
        name: of a field of `Traits` if a trait follows.
        ask: returns the value of a trait, else a message for the user or None.
    """

    name: str
    ask: Callable[[BuiltNetwork], Any]
    follows: Literal["trait", "note", "warning", "refusal"] = "trait"


refuses = partial(NetworkQuestion, follows="refusal")
warns = partial(NetworkQuestion, follows="warning")

# In this order: the first refusal ends it.
OF_NETWORKS = (
    NetworkQuestion("elements_per_sample", lambda network: network.elements_per_sample),
    refuses("a norm site", wiring.lacks_sites),
    refuses("effect of any norm", wiring.no_site_matters),
    warns("effect of every norm", wiring.idle_sites),
    warns("every norm at a site", wiring.other_norms),
    refuses("parameters of the network", wiring.parameters_outside),
    warns("gradient for every parameter", wiring.untrained_parameters),
    refuses("mergeable state", wiring.splits_sequential_state),
    NetworkQuestion("reaches", lambda network: network.once(reading.reaches_of)),
    refuses("statistics over one value", reading.statistics_over_one_value),
    refuses("reads padding", reading.padding_is_read),
    refuses("state saved", wiring.state_that_checkpoints_lack),
    NetworkQuestion("leak", reading.leak),
    NetworkQuestion("leaks_future_in_training", reading.future_leaks_in_training),
    refuses("reads the future", reading.future_leaks_in_evaluation),
    NetworkQuestion("reads the future in training", reading.future_leaks_in_training_alone, "note"),
    NetworkQuestion("draws_for_itself", lambda network: network.once(wiring.draws_for_itself)),
    NetworkQuestion("mixing", reading.mixing),
    NetworkQuestion("mixes_samples_in_evaluation", reading.samples_mix_in_evaluation),
    warns("mixes samples outside norms", reading.samples_mix_outside_norms),
    NetworkQuestion("stacking_obstacle", wiring.stacking_obstacle),
)


def ask_norm(questions: Iterable[Question], norm: LoneNorm) -> list[Answer]:
    return [question.answer(norm) for question in questions]
