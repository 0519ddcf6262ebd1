"""`python -m normexp.check norm=group`: the card of a norm, measured from outside."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from normexp.cli import entry, parse_command, read_options, split_options

if TYPE_CHECKING:
    from normexp.training.checks.card import Card
    from normexp.training.config.spec import CellSpec


@entry("check")
def main(words: list[str]) -> int:
    """Exit code: 0, 1 if the contract fails, 2 the user's mistake, 130 interrupted."""
    option_words, overrides = split_options("check", words)
    options = read_options("check", option_words)
    from normexp.training.config.command import compose_norms
    from normexp.training.sweeps.machine import importing_torch

    norms = compose_norms(parse_command(overrides))  # mistakes are refused before torch is imported

    with importing_torch():
        from normexp.training.checks.card import as_json, print_cards
        from normexp.verdicts.terminal import open_console

    cards = _measure(norms, contract_only=options["part"] == "contract")
    if options["format"] == "table":
        print_cards(open_console(), cards)
    else:
        print(as_json(cards))
    return 1 if any(card.failures for card in cards) else 0


def _measure(norms: Mapping[str, CellSpec], *, contract_only: bool) -> list[Card]:
    """The card of each norm, in order; a terminal shows which one is being measured."""
    from normexp.norms.build import norm_target
    from normexp.training.checks.card import measure_norm

    for spec in norms.values():
        norm_target(spec.config["norm"])  # import errors come first
    cards = []
    for name, spec in norms.items():
        if sys.stderr.isatty():
            print(f"measuring {name} ...", file=sys.stderr)
        may_mix = spec.settings.norm.may_mix_samples
        card = measure_norm(name, spec.config, may_mix=may_mix, contract_only=contract_only)
        cards.append(card)
    return cards


if __name__ == "__main__":
    sys.exit(main())
