"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdict of a study."""

from __future__ import annotations

import sys
from pathlib import Path

from normexp.cli import entry, read_options


@entry("report")
def main(words: list[str]) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 interrupted before it was written."""
    options = read_options("report", words)

    from normexp.reporting.publish import publish

    publish(
        Path(options["runs_dir"]),
        options["study"],
        metric=options["metric"],
        tolerance=options["tolerance"],
        watch=options["watch"],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
