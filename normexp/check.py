"""`python -m normexp.check norm=group`: the card of a norm, measured from outside."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from normexp.cli import run_entry


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where the contract fails, 2 the user's mistake, 130 interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_entry(lambda: _check(words))


def _check(words: list[str]) -> int:
    from normexp.config.arguments import parse_arguments
    from normexp.config.options import HELP, parse_card_options

    options, overrides = parse_card_options(words)
    arguments = parse_arguments(overrides)
    if arguments.help:
        print(HELP)
        return 0
    from normexp.cells.cards import compose_norms

    asked = compose_norms(arguments)  # refused before torch is imported

    from normexp.cells.cards import measure_cards, print_cards

    cards = measure_cards(asked, options)
    print_cards(cards, options.format)
    return 1 if any(card.failures for card in cards) else 0


if __name__ == "__main__":
    sys.exit(main())
