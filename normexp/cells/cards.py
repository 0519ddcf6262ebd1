"""Measures the cards of the norms of a command, and prints them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from normexp.batching.speed import suitable_threads
from normexp.build import norm_maker
from normexp.checks.card import Card, as_json, as_markdown, measure_card, print_cards
from normexp.config.spec import NormSpec
from normexp.norms.slots import resolve

PIPE_WIDTH = 120  # characters, without a terminal


@suitable_threads(0)  # probes are too small for a second thread to pay
def measure_cards(norms: Sequence[NormSpec], *, contract_only: bool) -> list[Card]:
    """The card of each norm, in order; says on stderr which one is being measured."""
    cards = []
    made = [norm_maker(one.config) for one in norms]  # fails first if a target does not import
    for one, (make, reserved) in zip(norms, made, strict=True):
        if sys.stderr.isatty():
            print(f"measuring {one.name} ...", file=sys.stderr)
        card = measure_card(
            make,
            name=one.name,
            target=str(one.config.norm["_target_"]),
            eps=one.config.eps,
            slots=resolve({}, reserved),
            contract_only=contract_only,
        )
        cards.append(card)
    return cards


def show_cards(cards: Sequence[Card], style: str) -> None:
    """To stdout: `json`, `markdown`, or as a table for a terminal."""
    if style == "table":
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        print_cards(Console(highlight=False, width=width), cards)
    else:
        print(as_json(cards) if style == "json" else as_markdown(cards))
