"""`python -m normexp.train norm=group`: trains one cell, or with -m every cell of a sweep."""

from __future__ import annotations

import sys
from functools import partial

from normexp.cli import entry, parse_command, show_config


@entry("train")
def main(words: list[str]) -> int:
    """Exit code: 0 finished or diverged, 1 failed, 2 the user's mistake, 130 interrupted."""
    command = parse_command(words)
    if command.shows_config:
        return show_config(command)
    line = ["normexp-train", *words]
    from normexp.training.config.command import compose_cells
    from normexp.training.sweeps.machine import check_processes

    cells = compose_cells(command)  # mistakes are refused before torch is imported
    rank = check_processes(cells, line)
    from normexp.training.sweeps.sweep import run_cells

    train = partial(run_cells, cells, line, command)
    if rank is None:
        return train()

    from normexp.training.cells.cell import Prepared
    from normexp.training.cells.devices import run_as_rank
    from normexp.training.cells.run import follow_stack

    return run_as_rank(cells, rank, train, partial(follow_stack, Prepared()))


if __name__ == "__main__":
    sys.exit(main())
