"""`python -m normexp.train norm=group`: trains one cell, or with -m every cell of a sweep."""

from __future__ import annotations

import sys
from functools import partial

from normexp.cli import entry, parse_command, show_config
from normexp.records.logs import messages_to_stderr


@entry("train")
def main(words: list[str]) -> int:
    """Exit code: 0 finished or diverged, 1 failed, 2 the user's mistake, 130 interrupted."""
    command = parse_command(words)
    if command.shows_config:
        return show_config(words)
    line = ["normexp-train", *words]
    from normexp.config.grid import compose_cells, launcher_of
    from normexp.config.spec import rank_for

    launcher = launcher_of(command)
    with messages_to_stderr():
        cells = compose_cells(command)  # mistakes are refused before torch is imported
    from normexp.sweeps.sweep import print_outcomes, run_cells

    if launcher is not None:
        from normexp.sweeps.launch import launch_cells

        return print_outcomes(cells, launch_cells(command, launcher, cells, line), line)
    rank = rank_for(cells)
    if rank is not None:  # one of the processes that srun or torchrun started
        from normexp.cells.devices import run_as_rank

        return run_as_rank(cells, rank, partial(run_cells, cells, line))
    return run_cells(cells, line)


if __name__ == "__main__":
    sys.exit(main())
