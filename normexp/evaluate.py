"""`python -m normexp.evaluate run=runs/<study>/<cell_id>`: a finished cell, evaluated again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from normexp.cli import run_entry


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 evaluated, 2 the user's mistake, 130 interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_entry(lambda: _evaluate(words))


def _evaluate(words: list[str]) -> int:
    from normexp.config.options import HELP_EVALUATE_OPTIONS as HELP
    from normexp.config.options import parse_evaluate_options

    if {"--help", "-h"} & set(words):
        print(HELP)
        return 0
    run, options = parse_evaluate_options(words)  # refused before torch is imported

    from normexp.cells.evaluate import evaluate_run
    from normexp.cells.logs import messages_to_stderr

    with messages_to_stderr():
        evaluate_run(Path(run), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
