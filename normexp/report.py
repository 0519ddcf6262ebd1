"""`python -m normexp.report study=NAME`: tables, figures, a page and the verdicts of a study.

Without a study: a page that lists all studies.
"""

from __future__ import annotations

import sys
from pathlib import Path

from normexp.cli import entry, read_options
from normexp.errors import UserError


@entry("report")
def main(words: list[str]) -> int:
    """Exit code: 0 written, 2 the user's mistake, 130 after Ctrl-C, which ends a watch."""
    options = read_options("report", words)

    unread = [word for word in words if not word.startswith(("study=", "runs_dir="))]
    if options["study"] is None and unread:
        raise UserError(f"{unread[0]}: set study=... too; without it, all studies are listed")

    from normexp.studies.report import publish, publish_index

    if options["study"] is None:
        publish_index(Path(options["runs_dir"]))
        return 0

    asked = {key: options[key] for key in ("watch", "metric", "tolerance", "reference")}
    publish(Path(options["runs_dir"]), options["study"], **asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
