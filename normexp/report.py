"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdict of a study."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from normexp.cli import run_entry
from normexp.reporting.options import HELP, parse_options


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 interrupted before it was written."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_entry(lambda: _report(words))


def _report(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(HELP)
        return 0
    options = parse_options(words)
    from normexp.reporting.publish import publish

    publish(
        options.runs_dir,
        options.studies,
        metric=options.metric,
        tolerance=options.tolerance,
        watch=options.watch,
        log_wandb="wandb" in options.log,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
