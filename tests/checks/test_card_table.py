"""Cards in a terminal."""

from __future__ import annotations

from rich.console import Console

from normexp.checks.card import Card, Line
from normexp.checks.card_table import print_card, print_comparison


def test_names_with_brackets_are_text(capsys):
    line = Line("traits", "shape [/x]", "pass")
    card = Card("mine", "a.B", 8, "(B, C)", (line,))
    console = Console()
    print_card(console, card)
    print_comparison(console, [card, card])
    assert capsys.readouterr().out.count("shape [/x]") == 2
