"""`python -m normexp.confirm study=NAME best=2`: the best tries of a study on unused seeds."""

from __future__ import annotations

import sys

from normexp.cli import entry, read_options


@entry("confirm")
def main(words: list[str]) -> int:
    """Exit code: 0 confirmed and reported, 1 something failed, 2 a mistake, 130 interrupted."""
    options = read_options("confirm", words)

    from normexp.training.search.confirm import confirm

    return confirm(options, ["normexp-confirm", *words])


if __name__ == "__main__":
    sys.exit(main())
