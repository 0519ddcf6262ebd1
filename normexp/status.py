"""`python -m normexp.status study=NAME`: the ended, missing and failed runs of a study."""

from __future__ import annotations

import sys
from pathlib import Path

from normexp.cli import entry, read_options


@entry("status")
def main(words: list[str]) -> int:
    """Exit code: 0 shown, 2 the user's mistake."""
    options = read_options("status", words)

    from normexp.records.state import read_status
    from normexp.reporting.terminal import print_status

    print_status(read_status(Path(options["runs_dir"]), options["study"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
