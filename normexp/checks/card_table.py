"""Cards in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.checks.card import Card, Line
from normexp.checks.card_formats import all_failures, headline, outcome, side_by_side, verdict

STYLES = {"pass": "green", "fail": "bold red", "value": "", "skipped": "dim"}
CELL_WIDTH = 12  # of a norm in a comparison, at least
NAME_WIDTH = 31  # of a line's name


def print_card(console: Console, card: Card) -> None:
    """Every line with what shows it; the failed ones again at the end, with the target."""
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
    """A column for each norm, in several tables where a terminal is too narrow for one."""
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
