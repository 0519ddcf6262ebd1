"""`python -m normexp.status study=NAME`: the ended, missing and failed runs of a study."""

from __future__ import annotations

import sys
from pathlib import Path

from normexp.cli import entry, read_options


@entry("status")
def main(words: list[str]) -> int:
    """Exit code: 0 shown, 2 the user's mistake, such as forgetting what is being trained."""
    options = read_options("status", words)

    from normexp.records.state import forget, read_status
    from normexp.reporting.terminal import print_status

    runs_dir, study = Path(options["runs_dir"]), options["study"]
    for line in forget(runs_dir, study, options["forget"] or []):
        print(f"forgotten: {line}")
    print_status(read_status(runs_dir, study))
    return 0


if __name__ == "__main__":
    sys.exit(main())
