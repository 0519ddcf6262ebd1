"""`python -m normexp.tune lr=choice(0.1,1)`: searches on validation, then trains fresh seeds."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from normexp.cli import run_entry
from normexp.config.arguments import parse_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 searched and reported, 1 something failed, 2 a mistake, 130 interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_entry(lambda: _tune(words))


def _tune(words: list[str]) -> int:
    arguments = parse_arguments(words)
    if arguments.help:
        from normexp.config.help import help_text_tuning_help as help_text

        print(help_text())
        return 0
    if arguments.delegate:
        from normexp.cli import hydra_app

        return hydra_app(words)
    from normexp.search.points import plan_searches

    plans = plan_searches(arguments)  # refused before torch is imported

    from normexp.search.select import tune

    return tune(plans, ["normexp-tune", *words])


if __name__ == "__main__":
    sys.exit(main())
