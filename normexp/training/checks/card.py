"""The card of a norm, contract and traits, as a table or JSON; and the contract as an assertion."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from normexp.errors import UserError
from normexp.norms.build import norm_target
from normexp.training.batching.replicas import suitable_threads
from normexp.training.checks.norm import open_norm
from normexp.training.checks.question import Answer
from normexp.training.checks.questions import (
    BUILT,
    CONTRACT,
    FINITE,
    MIXES_SAMPLES,
    OF_NORMS,
    ON_CONSTANTS,
    READS_FUTURE,
    SHAPE_KEPT,
    WIDE_IN_HALF,
)
from normexp.words import format_count

SCHEMA = 2
STYLES = {"pass": "green", "fail": "bold red", "value": "", "skipped": "dim"}
CELL_WIDTH = 12  # minimum width of a norm's column in a comparison
NAME_WIDTH = 31  # width of the column with the names of lines


@dataclass(frozen=True)
class Card:
    """The lines of one norm.

    Attributes:
        name: as the user calls it.
        target: what was built.
        num_features: channels of the inputs it was measured on; 0 if it cannot be built.
        takes: its layout, and the numbers of dimensions that it accepts unwrapped.
        sees_texts: it is shown whole texts in a network, not single tokens.
    """

    name: str
    target: str
    num_features: int
    takes: str
    lines: tuple[Answer, ...]
    sees_texts: bool = False

    @property
    def failures(self) -> list[Answer]:
        """The lines of the contract that failed."""
        return [line for line in self.lines if line.status == "fail"]

    @property
    def headline(self) -> str:
        if not self.num_features:
            return f"{self.name} ({self.target}): cannot be built"
        return f"{self.name} ({self.target}), {self.num_features} channels; takes {self.takes}"

    @property
    def verdict(self) -> str:
        if self.failures:
            count = format_count(len(self.failures), "line")
            return f"{self.name}: {count} of the contract failed"
        verdict = f"{self.name}: the contract holds"
        in_evaluation = {line.name for line in self.lines if line.value in ("yes", "in evaluation")}
        if MIXES_SAMPLES in in_evaluation:
            verdict += "; its evaluation depends on the other samples of a batch, and on its size"
        if self.sees_texts and READS_FUTURE in in_evaluation:
            verdict += "; it reads later tokens, so causal models such as model=gpt refuse it"
        if any(line.name == WIDE_IN_HALF and line.value == "no" for line in self.lines):
            verdict += "; it loses digits in bfloat16, so train it in float32"
        return verdict


def measure_card(
    make: Callable[..., Any],
    *,
    name: str,
    target: str,
    eps: float | None = None,
    num_features: int | None = None,
    layout: Literal["first", "last"] | None = None,
    sees_texts: bool = False,
    may_mix: bool = True,
    contract_only: bool = False,
) -> Card:
    """Measures every line of a norm's card; each question builds the norm afresh.

    Skips all further questions if no input is taken, or outputs are not finite.

    Args:
        make: a class or partial with the user's knobs bound.
        may_mix: False if it declares `mixes_samples = False`.
        contract_only: leaves out the traits.

    Raises:
        UserError: not callable, an unknown knob, an argument that is not set, no nn.Module.
    """
    try:
        norm = open_norm(make, target=target, eps=eps, num_features=num_features, layout=layout)
    except UserError as error:
        if error.__cause__ is None or isinstance(error.__cause__, TypeError | UserError):
            raise
        line = Answer("contract", BUILT, "fail", detail=str(error))
        return Card(name, target, 0, "no input", (line,))
    norm = replace(norm, may_mix=may_mix)
    lines = [Answer("contract", BUILT)]
    obstacle = ""  # to all further questions
    for question in OF_NORMS:
        rules_out_models = sees_texts and question.name == READS_FUTURE
        if contract_only and question.section == "traits" and not rules_out_models:
            continue
        if obstacle:
            lines.append(Answer(question.section, question.name, "skipped", detail=obstacle))
            continue
        line = question.answer(norm)
        lines.append(line)
        if question.name == SHAPE_KEPT and norm.problem:
            obstacle = "no input is taken"
        if question.name == FINITE and line.status == "fail" and ON_CONSTANTS not in line.detail:
            obstacle = "outputs are not finite"
    return Card(name, target, norm.num_features, norm.takes, tuple(lines), sees_texts)


@suitable_threads()
def measure_norm(
    name: str, config: Mapping[str, Any], *, may_mix: bool = True, contract_only: bool = False
) -> Card:
    """The card of a norm, see `measure_card`."""
    target, reserved = norm_target(config["norm"])
    return measure_card(
        target.call,
        name=name,
        target=target.path,
        eps=config["eps"],
        layout=reserved.get("layout"),
        sees_texts=reserved.get("view") == "sequence",
        may_mix=may_mix,
        contract_only=contract_only,
    )


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
        num_features: channels of the inputs; by default 64, or 8 if it refuses those.
        eps: passed if the signature has one and nothing has set it.
        except_for: names of lines that may fail, as `("gradient",)`.

    Raises:
        UserError: an argument that is not set, something that makes no nn.Module, or a name in
            `except_for` that no line has.
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(f"factory={factory!r}: must be a class, as in assert_contract(MyNorm)")
    waived = {except_for} if isinstance(except_for, str) else set(except_for)
    for name in sorted(waived.difference(CONTRACT)):
        there_are = ", ".join(CONTRACT)
        raise UserError(f"except_for: the contract has no line {name!r}; there are {there_are}")
    made: Any = factory
    while isinstance(made, partial):
        made = made.func
    kind = made if hasattr(made, "__qualname__") else type(made)
    target = f"{kind.__module__}.{kind.__qualname__}"
    card = measure_card(
        factory,
        name=target,
        target=target,
        eps=eps,
        num_features=num_features,
        may_mix=getattr(made, "mixes_samples", None) is not False,
        contract_only=True,
    )
    broken = [line for line in card.failures if line.name not in waived]
    if broken:
        lines = [f"  {line.name}: {line.detail}" for line in broken]
        raise AssertionError("\n".join([f"{target} breaks the contract:", *lines]))


# ---------------------------------------------------------------- output


def as_json(cards: Sequence[Card]) -> str:
    """{"schema": 2, "torch": ..., "cards": [{"name", "target", ..., "passes", "lines": [...]}]}."""
    body = {
        "schema": SCHEMA,
        "torch": str(torch.__version__),
        "cards": [{**asdict(card), "passes": not card.failures} for card in cards],
    }
    return json.dumps(body, indent=2)


def print_cards(console: Console, cards: Sequence[Card]) -> None:
    """Prints verdicts and failures, then traits.

    One card has its details; several have a column each, in several tables if the terminal is too
    narrow for one.
    """
    for card in cards:
        if len(cards) == 1:
            console.print(card.headline, markup=False)
        console.print(card.verdict, markup=False, style="bold red" if card.failures else "green")
    for card in cards:
        for line in card.failures:
            question = f" ({line.question})" if line.question else ""
            said = f"  FAIL {card.name}, {line.name}: {line.detail}{question}"
            console.print(said, markup=False, style="red")
    fitting = max(1, (console.width - NAME_WIDTH) // (CELL_WIDTH + 2))
    for first in range(0, len(cards), fitting):
        console.print(_table(cards[first : first + fitting], alone=len(cards) == 1))


def _table(cards: Sequence[Card], *, alone: bool) -> Table:
    table = Table(box=None, pad_edge=False, show_header=not alone)
    table.add_column("", no_wrap=True)
    for card in cards:
        justify = "left" if alone else "right"
        table.add_column(Text(card.name), min_width=CELL_WIDTH, justify=justify)
    table.add_column(style="dim", overflow="fold")
    found = [{line.name: line for line in card.lines} for card in cards]
    for name in dict.fromkeys(name for lines in found for name in lines):
        answers = [lines.get(name) for lines in found]
        if any(line and (line.section == "traits" or line.status == "fail") for line in answers):
            # Those of failures are printed above the table.
            details = [line.detail for line in answers if alone and line and line.status != "fail"]
            table.add_row(Text(name), *map(_cell, answers), Text("".join(details)))
    return table


def _cell(line: Answer | None) -> Text:
    if line is None or line.status == "skipped":
        return Text("-", style="dim")
    value = f"{line.value:,}" if isinstance(line.value, int) else str(line.value)
    said = {"value": value, "fail": "FAIL", "pass": "pass"}[line.status]
    return Text(said, style=STYLES[line.status])
