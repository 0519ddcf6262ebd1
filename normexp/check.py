"""`python -m normexp.check norm=group`: the card of a norm, measured from outside."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from normexp.cli import parse_command, read_options, run_entry, split_options
from normexp.config.imports import importing_torch


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if the contract fails, 2 the user's mistake, 130 interrupted."""
    return run_entry("check", argv, _check)


def _check(words: list[str]) -> int:
    own, overrides = split_options("check", words)
    options = read_options("check", own)
    from normexp.config.grid import compose_norms

    norms = compose_norms(parse_command(overrides))  # mistakes are refused before torch is imported

    with importing_torch():
        from normexp.cells.cards import measure_cards, show_cards

    cards = measure_cards(norms, contract_only=options["part"] == "contract")
    show_cards(cards, options["format"])
    return 1 if any(card.failures for card in cards) else 0


if __name__ == "__main__":
    sys.exit(main())
