"""The card of a norm: contract, traits, compatibility and cost; as table, JSON or Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.checks.asking import SECTIONS, Answer
from normexp.checks.contract import open_and_measure
from normexp.norms.slots import Slots

SCHEMA = 1
CAUSALITY = "leaks the future"  # breaks no contract, and rules out causal models
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
        return [line for line in self.lines if line.section == "contract" and line.status == "fail"]

    @property
    def headline(self) -> str:
        if not self.num_features:
            return f"{self.name} ({self.target}): cannot be built"
        return f"{self.name} ({self.target}), {self.num_features} channels; takes {self.takes}"

    @property
    def verdict(self) -> str:
        count = len(self.failures)
        if not count:
            return f"{self.name}: the contract holds{self._causality()}"
        return f"{self.name}: {count} {'line' if count == 1 else 'lines'} of the contract failed"

    def _causality(self) -> str:
        """That a norm reads later tokens, which those that see single tokens cannot."""
        leaks = next((line.value for line in self.lines if line.name == CAUSALITY), "no")
        if not self.sees_texts or leaks not in ("yes", "in evaluation"):
            return ""
        return "; it reads later tokens, so causal models such as model=gpt refuse it"


def measure_card(
    make: Callable[..., Any],
    *,
    name: str,
    target: str,
    eps: float,
    slots: Slots,
    sees_texts: bool = False,
    contract_only: bool = False,
) -> Card:
    """Measures every line of a norm's card; each question builds the norm afresh.

    Args:
        make: a class or partial with the user's knobs bound.
        contract_only: leaves out traits, compatibility and cost.

    Raises:
        UserError: not callable, an unknown knob, an argument that is not set, no nn.Module.
    """
    sections = SECTIONS[:1] if contract_only else SECTIONS
    also = (CAUSALITY,) if sees_texts else ()
    norm, lines = open_and_measure(make, sections, also, target=target, eps=eps, slots=slots)
    if norm is None:
        return Card(name, target, 0, "no input", tuple(lines))
    return Card(name, target, norm.num_features, norm.takes, tuple(lines), sees_texts)


def as_json(cards: Sequence[Card]) -> str:
    """{"schema": 1, "torch": ..., "cards": [{"name", "target", ..., "passes", "lines": [...]}]}."""
    body = {
        "schema": SCHEMA,
        "torch": str(torch.__version__),
        "cards": [{**asdict(card), "passes": not card.failures} for card in cards],
    }
    return json.dumps(body, indent=2)


def as_markdown(cards: Sequence[Card]) -> str:
    """The failures, then every line: one card with its details, several side by side."""
    alone = len(cards) == 1
    titles = [cards[0].name, "shown by"] if alone else [card.name for card in cards]
    rows = [["", *titles], ["---", *["---"] * len(titles)]]
    for section, lines in side_by_side(cards):
        rows.append([f"**{section}**", *[""] * len(titles)])
        for name, answers in lines:
            details = [answers[0].detail] if alone and answers[0] else []
            rows.append([name, *map(outcome, answers), *details])
    table = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
    failures = [f"- {card.name}, {line.name}: {line.detail}" for card, line in failures_of(cards)]
    head = [card.headline if alone else card.verdict for card in cards]
    blocks = [head, failures, table]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def outcome(line: Answer | None) -> str:
    """The result of a line in a word or a number; `-` if there is none."""
    if line is None or line.status == "skipped":
        return "-"
    if line.status == "value":
        return f"{line.value:,}" if isinstance(line.value, int) else str(line.value)
    return "FAIL" if line.status == "fail" else "pass"


Rows = list[tuple[str, list[Answer | None]]]


def side_by_side(cards: Sequence[Card]) -> list[tuple[str, Rows]]:
    """Groups the lines of all cards by section and name; None where a card lacks the line."""
    sections: dict[str, dict[str, None]] = {}
    for line in (line for card in cards for line in card.lines):
        sections.setdefault(line.section, {})[line.name] = None
    by_name = [{(line.section, line.name): line for line in card.lines} for card in cards]
    return [
        (section, [(name, [lines.get((section, name)) for lines in by_name]) for name in names])
        for section, names in sections.items()
    ]


def failures_of(cards: Sequence[Card]) -> list[tuple[Card, Answer]]:
    """Every failed line of any section."""
    return [(card, line) for card in cards for line in card.lines if line.status == "fail"]


def print_cards(console: Console, cards: Sequence[Card]) -> None:
    """Prints verdicts and failures, then traits and whatever says more than `pass`, then counts.

    One card has its details; several have a column each, in several tables if the terminal is too
    narrow for one.
    """
    for card in cards:
        if len(cards) == 1:
            console.print(card.headline, markup=False)
        console.print(card.verdict, markup=False, style="bold red" if card.failures else "green")
    for card, line in failures_of(cards):
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
        table.add_column(
            Text(card.name), min_width=CELL_WIDTH, justify="left" if alone else "right"
        )
    if alone:
        table.add_column(style="dim", overflow="fold")
    sections = dict(side_by_side(cards))
    for section in sorted(sections, key=lambda name: name != "traits"):
        shown = [row for row in sections[section] if not all(map(_is_plain, row[1]))]
        if shown:
            table.add_row(Text(f"\n{section}", style="bold"))
        for name, answers in shown:
            details = [Text(line.detail) for line in answers[:1] if alone and line]
            table.add_row(Text(f"  {name}"), *map(_cell, answers), *details)
    rows = [answers for lines in sections.values() for _, answers in lines]
    plain = [answers for answers in rows if all(map(_is_plain, answers))]
    if plain:
        passes = [
            sum(line.status == "pass" for line in lines if line)
            for lines in zip(*plain, strict=True)
        ]
        marks = [Text(f"\n{count} pass", style=STYLES["pass"]) for count in passes]
        hint = ["\nthe others do not apply; format=markdown lists all"] if alone else []
        table.add_row(Text(f"\n{len(plain)} more lines"), *marks, *hint)
    return table


def _is_plain(line: Answer | None) -> bool:
    """True if the line need not be shown: skipped, or passed without a remark."""
    if line is None or line.section == "traits":
        return False
    return line.status == "skipped" or (line.status == "pass" and not line.detail)


def _cell(line: Answer | None) -> Text:
    return Text(outcome(line), style=STYLES[line.status] if line else "dim")
