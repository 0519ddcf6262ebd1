"""A command in each of the processes that srun or torchrun has started for it."""

from __future__ import annotations

from collections.abc import Sequence

from normexp.cells.devices import follow
from normexp.cells.peers import meet
from normexp.config.spec import CellSpec, place_of_command
from normexp.sweeps.sweep import run_cells


def run_together(cells: Sequence[CellSpec], words: Sequence[str]) -> int:
    """As `run_cells`, which is what the first process does; the others help it to train."""
    place = place_of_command(cells)
    assert place is not None
    if any(cell.cfg is not None and cell.cfg.dry_run for cell in cells):
        return 0 if place[0] > 0 else run_cells(cells, words)
    peers = meet(*place)
    if peers.index > 0:
        return follow(peers)
    try:
        return run_cells(cells, words)
    finally:
        peers.dismiss()
