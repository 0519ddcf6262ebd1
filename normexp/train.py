"""`python -m normexp.train norm=group`: trains one cell, or with -m every cell of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from normexp.cli import run_entry
from normexp.config.arguments import parse_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 finished or diverged, 1 failed, 2 the user's mistake, 130 interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_entry(lambda: _train(words))


def _train(words: list[str]) -> int:
    arguments = parse_arguments(words)
    if arguments.help:
        from normexp.config.help import help_text

        print(help_text(arguments.config_dirs))
        return 0
    if arguments.delegate:
        from normexp.cli import hydra_app

        return hydra_app(words)
    from normexp.config.grid import compose_cells

    if arguments.launcher is not None:
        from normexp.sweeps.launch import launch

        return launch(arguments, ["normexp-train", *words])
    cells = compose_cells(arguments)  # refused before torch is imported

    from normexp.config.place import place_of_command

    if place_of_command(cells) is not None:  # one of those that srun or torchrun has started
        from normexp.sweeps.together import run_together

        return run_together(cells, ["normexp-train", *words])
    from normexp.sweeps.sweep import run_cells

    return run_cells(cells, ["normexp-train", *words])


if __name__ == "__main__":
    sys.exit(main())
