"""From a command line to the norms whose cards it asks for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from omegaconf import DictConfig
from rich.console import Console

from normexp.build import norm_maker
from normexp.checks.card import (
    Card,
    as_json,
    as_markdown,
    measure_card,
    print_card,
    print_comparison,
)
from normexp.config.arguments import Arguments
from normexp.config.compose import compose_config, parse_overrides
from normexp.config.grid import expand_grid
from normexp.config.options import OWN_KEYS, CardOptions
from normexp.config.rules import validate
from normexp.errors import UserError
from normexp.norms.slots import resolve

# Keys of a norm's YAML that speak of a training.
OF_A_TRAINING = {
    "norm.view": "a card shows the norm (N, C, *), whatever view its models use",
    "norm.half_life": "a card knows no batch size; set norm.momentum",
}


@dataclass(frozen=True)
class Asked:
    """A norm that was asked for: its name with the knobs that the command line sets, its config."""

    name: str
    config: DictConfig


def compose_norms(arguments: Arguments) -> list[Asked]:
    """The norms of a command line, the product of what it names several values of.

    Raises:
        UserError: a key that has no effect on a card, or whatever does not compose.
    """
    for override in parse_overrides(arguments.overrides):
        _refuse_other_key(override.key_or_group, str(override.input_line))
    cells = expand_grid(arguments.overrides, arguments.config_dirs)
    asked = []
    for cell in cells:
        config = compose_config(cell, arguments.config_dirs)
        validate(config)
        asked.append(Asked(_name_of(cell, config), config))
    return asked


def _refuse_other_key(key: str, text: str) -> None:
    if key in OF_A_TRAINING:
        raise UserError(f"{text}: {OF_A_TRAINING[key]}")
    if key in ("norm", "eps") or key.startswith("norm."):
        return
    known = ["norm", "eps", *OWN_KEYS]
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"a card takes {', '.join(known)}"
    raise UserError(f"{text}: no key of a card; {hint}")


def _name_of(cell: Sequence[str], config: DictConfig) -> str:
    """`batch`, `group num_groups=4`, or the class of a custom norm with its knobs."""
    chosen, knobs = "batch", []
    for text, override in zip(cell, parse_overrides(cell), strict=True):
        key = override.key_or_group
        if key == "norm":
            chosen = str(override.value())
        elif key != "norm._target_":
            knobs.append(text.lstrip("+").removeprefix("norm."))
    if chosen == "custom":
        chosen = str(config.norm["_target_"]).rpartition(".")[2]
    return " ".join([chosen, *knobs])


PIPE_WIDTH = 120  # characters, where no terminal says how many there are


def measure_cards(asked: Sequence[Asked], options: CardOptions) -> list[Card]:
    """The card of each norm, in order; says on stderr which one is being measured."""
    cards = []
    made = [norm_maker(one.config) for one in asked]  # a target that does not import, first
    for one, (make, reserved) in zip(asked, made, strict=True):
        if sys.stderr.isatty():
            print(f"measuring {one.name} ...", file=sys.stderr)
        card = measure_card(
            make,
            name=one.name,
            target=str(one.config.norm["_target_"]),
            eps=one.config.eps,
            slots=resolve({}, reserved),
            contract_only=options.contract_only,
        )
        cards.append(card)
    return cards


def print_cards(cards: Sequence[Card], style: str) -> None:
    """To stdout: `json`, `markdown`, or as a table for a terminal."""
    if style == "json":
        print(as_json(cards))
        return
    if style == "markdown":
        print(as_markdown(cards))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    if len(cards) == 1:
        print_card(console, cards[0])
    else:
        print_comparison(console, cards)
