"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdict of a study."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from normexp.cli import read_options, run_entry


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 interrupted before it was written."""
    return run_entry("report", argv, _report)


def _report(words: list[str]) -> int:
    options = read_options("report", words)

    from normexp.reporting.publish import publish

    publish(
        Path(options["runs_dir"]),
        options["study"],
        metric=options["metric"],
        tolerance=options["tolerance"],
        watch=options["watch"],
        log_wandb=bool(options["log"]),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
