"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdicts of a study."""

from __future__ import annotations

import sys
from pathlib import Path

from normexp.cli import entry, read_options


@entry("report")
def main(words: list[str]) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 after Ctrl-C, which ends a watch."""
    options = read_options("report", words)

    from normexp.reporting.publish import publish

    keys = ("watch", "metric", "tolerance", "reference")
    asked = {key: options[key] for key in keys}
    publish(Path(options["runs_dir"]), options["study"], **asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
