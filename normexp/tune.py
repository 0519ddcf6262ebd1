"""`python -m normexp.tune lr=choice(0.1,1)`: searches on validation, then trains fresh seeds."""

from __future__ import annotations

import sys

from normexp.cli import entry, parse_command, show_config


@entry("tune")
def main(words: list[str]) -> int:
    """Exit code: 0 searched and reported, 1 something failed, 2 a mistake, 130 interrupted."""
    command = parse_command(words)
    if command.shows_config:
        return show_config(command)
    from normexp.training.search.points import plan_searches
    from normexp.training.search.select import tune

    return tune(plan_searches(command), ["normexp-tune", *words])


if __name__ == "__main__":
    sys.exit(main())
