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

from normexp.checks.compatibility import COMPATIBILITY, COST
from normexp.checks.contract import open_and_measure
from normexp.checks.subject import Line, run_checks
from normexp.checks.traits import TRAITS
from normexp.norms.slots import Slots

SCHEMA = 1
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


def measure_card(
    make: Callable[..., Any],
    *,
    name: str,
    target: str,
    eps: float,
    slots: Slots,
    contract_only: bool = False,
) -> Card:
    """Measures every line of a norm, building it afresh for each check.

    Args:
        make: a class or partial with the user's knobs bound.
        contract_only: leaves out traits, compatibility and cost.

    Raises:
        UserError: not callable, an unknown knob, an argument that is not set, no nn.Module.
    """
    subject, lines = open_and_measure(make, target=target, eps=eps, slots=slots)
    if subject is None:
        return Card(name, target, 0, "no input", tuple(lines))
    if subject.shapes and not contract_only:
        lines += run_checks("traits", TRAITS, subject)
        lines += run_checks("compatibility", COMPATIBILITY, subject)
        lines += run_checks("cost", COST, subject)
    return Card(name, target, subject.num_features, subject.takes, tuple(lines))


def as_json(cards: Sequence[Card]) -> str:
    """{"schema": 1, "torch": ..., "cards": [{"name", "target", ..., "passes", "lines": [...]}]}."""
    body = {
        "schema": SCHEMA,
        "torch": str(torch.__version__),
        "cards": [{**asdict(card), "passes": not card.failures} for card in cards],
    }
    return json.dumps(body, indent=2)


def as_markdown(cards: Sequence[Card]) -> str:
    """One card with its details, or several side by side with what failed below."""
    if len(cards) == 1:
        return _one_as_markdown(cards[0])
    names = [card.name for card in cards]
    rows = [["", *names], ["---", *["---"] * len(names)]]
    for section, lines in side_by_side(cards):
        rows.append([f"**{section}**", *[""] * len(names)])
        rows += [[name, *(outcome(line) for line in found)] for name, found in lines]
    text = "\n".join(_row(row) for row in rows)
    below = [f"- {card.name}, {line.name}: {line.detail}" for card, line in all_failures(cards)]
    return text + ("\n\n" + "\n".join(below) if below else "")


def _one_as_markdown(card: Card) -> str:
    rows = [["", card.name, "shown by"], ["---", "---", "---"]]
    for section, lines in side_by_side([card]):
        rows.append([f"**{section}**", "", ""])
        rows += [[name, outcome(line), line.detail if line else ""] for name, (line,) in lines]
    return "\n".join([headline(card), "", *(_row(row) for row in rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def headline(card: Card) -> str:
    """What was measured, in one line."""
    if not card.num_features:
        return f"{card.name} ({card.target}): cannot be built"
    return f"{card.name} ({card.target}), {card.num_features} channels; takes {card.takes}"


def verdict(card: Card) -> str:
    """States in one line whether the contract holds."""
    count = len(card.failures)
    if not count:
        return f"{card.name}: the contract holds"
    return f"{card.name}: {count} {'line' if count == 1 else 'lines'} of the contract failed"


def outcome(line: Line | None) -> str:
    """The result of a line in a word or a number; `-` if there is none."""
    if line is None or line.status == "skipped":
        return "-"
    if line.status == "value":
        return f"{line.value:,}" if isinstance(line.value, int) else str(line.value)
    return "FAIL" if line.status == "fail" else "pass"


def side_by_side(
    cards: Sequence[Card],
) -> list[tuple[str, list[tuple[str, list[Line | None]]]]]:
    """By section and line, in the order of the cards, the line of each card."""
    keys = dict.fromkeys((line.section, line.name) for card in cards for line in card.lines)
    found = [{(line.section, line.name): line for line in card.lines} for card in cards]
    sections = dict.fromkeys(section for section, _ in keys)
    return [
        (
            section,
            [
                (name, [own.get((section, name)) for own in found])
                for own_section, name in keys
                if own_section == section
            ],
        )
        for section in sections
    ]


def all_failures(cards: Sequence[Card]) -> list[tuple[Card, Line]]:
    """Every failed line of any section."""
    return [(card, line) for card in cards for line in card.lines if line.status == "fail"]


def print_card(console: Console, card: Card) -> None:
    """Prints every line with its detail, and the failures again at the end, with the target."""
    console.print(headline(card), markup=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for section, lines in side_by_side([card]):
        table.add_row(Text(f"\n{section}", style="bold"), "", "")
        for name, (line,) in lines:
            table.add_row(Text(f"  {name}"), _shown(line), Text(line.detail if line else ""))
    console.print(table)
    console.print()
    _print_failures(console, [card])
    _print_verdicts(console, [card])


def print_comparison(console: Console, cards: Sequence[Card]) -> None:
    """Prints a column per norm, in several tables if the terminal is too narrow for one."""
    fitting = max(1, (console.width - NAME_WIDTH) // (CELL_WIDTH + 2))
    for first in range(0, len(cards), fitting):
        _print_table(console, cards[first : first + fitting])
    console.print()
    _print_failures(console, cards)
    _print_verdicts(console, cards)


def _print_table(console: Console, cards: Sequence[Card]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for card in cards:
        table.add_column(Text(card.name), min_width=CELL_WIDTH, justify="right")
    for section, lines in side_by_side(cards):
        table.add_row(Text(section, style="bold"), *[""] * len(cards))
        for name, found in lines:
            table.add_row(Text(f"  {name}"), *map(_shown, found))
    console.print(table)


def _shown(line: Line | None) -> Text:
    return Text(outcome(line), style=STYLES[line.status] if line else "dim")


def _print_failures(console: Console, cards: Sequence[Card]) -> None:
    for card, line in all_failures(cards):
        said = f"{card.name} ({card.target}), {line.name}: {line.detail}"
        console.print(said, markup=False, style="red")


def _print_verdicts(console: Console, cards: Sequence[Card]) -> None:
    for card in cards:
        style = "bold red" if card.failures else "green"
        console.print(verdict(card), markup=False, style=style)
