"""Cards as JSON and as Markdown, and what both and the terminal say of a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch

from normexp.checks.card import Card, Line

SCHEMA = 1


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
    """Whether the contract holds, in one line."""
    count = len(card.failures)
    if not count:
        return f"{card.name}: the contract holds"
    return f"{card.name}: {count} {'line' if count == 1 else 'lines'} of the contract failed"


def outcome(line: Line | None) -> str:
    """The result of a line in a word or a number; `-` where there is none."""
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
