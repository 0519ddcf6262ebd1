"""`python -m normexp`: what commands there are."""

from __future__ import annotations

import sys

from normexp.training.config.help import USAGE
from normexp.words import suggest

HOW = "\nEach has --help. From Python: see normexp/README.md."


def main(words: list[str]) -> int:
    """Prints a line per command; exit code 2 if a command was meant, `python -m normexp train`."""
    if words and not {"-h", "--help"} & set(words):
        near = suggest(words[0], USAGE) or "see python -m normexp"
        print(
            f"normexp: a command is python -m normexp.NAME, not {words[0]}; {near}", file=sys.stderr
        )
        return 2
    for name, usage in USAGE.items():
        first = usage.splitlines()[0]
        print(f"  python -m normexp.{name:<10} {first.partition(' ')[2]}")
    print(HOW)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
