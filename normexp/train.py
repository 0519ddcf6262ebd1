"""`python -m normexp.train norm=group`: trains one cell, or with -m every cell of a sweep."""

from __future__ import annotations

import sys
from functools import partial

from normexp.cli import ask_hydra, entry, parse_command


@entry("train")
def main(words: list[str]) -> int:
    """Exit code: 0 finished or diverged, 1 failed, 2 the user's mistake, 130 interrupted."""
    command = parse_command(words)
    if command.asks_hydra:
        return ask_hydra(words)
    line = ["normexp-train", *words]
    from normexp.config.grid import compose_cells, launcher_of
    from normexp.config.spec import place_of_command

    launcher = launcher_of(command)
    cells = compose_cells(command)  # mistakes are refused before torch is imported
    from normexp.sweeps.sweep import conclude, run_cells

    if launcher is not None:
        from normexp.sweeps.launch import launch_cells

        return conclude(cells, launch_cells(command, launcher, cells, line), line)
    place = place_of_command(cells)
    if place is not None:  # one of the processes of srun or torchrun
        from normexp.cells.devices import run_together

        return run_together(cells, place, partial(run_cells, cells, line))
    return run_cells(cells, line)


if __name__ == "__main__":
    sys.exit(main())
