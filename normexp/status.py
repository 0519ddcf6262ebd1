"""`python -m normexp.status study=NAME`: what a study has, lacks and failed."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from normexp.cli import run_entry
from normexp.errors import UserError
from normexp.sweeps.status import print_status, read_status

HELP = """\
normexp.status says which runs of a study have ended, which are missing, and why some failed.

  python -m normexp.status study=NAME      also while it is running, from another terminal

Values (key=value) and their defaults:
  study            name of a study; required
  runs_dir=runs    folder of all studies
"""
KEYS = ("study", "runs_dir")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 told, 2 the user's mistake."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_entry(lambda: _status(words))


def _status(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(HELP)
        return 0
    values = {"runs_dir": "runs"}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS or not value:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"; did you mean {near[0]}=...?" if near else f" (it takes {', '.join(KEYS)})"
            raise UserError(f"{word}: not a value of status{hint}")
        values[key] = value
    if "study" not in values:
        raise UserError("study is missing: name one, as in study=default")
    print_status(read_status(Path(values["runs_dir"]), values["study"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
