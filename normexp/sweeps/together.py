"""A command in each of the processes that srun or torchrun has started for it."""

from __future__ import annotations

from collections.abc import Sequence

from normexp.cells.devices import started_ranks
from normexp.config.spec import CellSpec
from normexp.errors import INTERRUPTED, USER_MISTAKE, UserError
from normexp.sweeps.sweep import run_cells
from normexp.training.stopping import Interrupted


def run_together(cells: Sequence[CellSpec], words: Sequence[str], index: int) -> int:
    """Trains one cell as `run_cells`, which the first process calls; the others help it to train.

    Args:
        index: of this process.

    Raises:
        UserError: several cells; one process says so.
    """
    cfg = cells[0].cfg
    if len(cells) > 1 or cfg is None:
        if index > 0:
            return USER_MISTAKE
        raise UserError(
            f"{len(cells)} cells in one srun or torchrun: start one cell each, or drop srun; "
            "trainer=ddp starts its processes itself"
        )
    if cfg.dry_run:
        return 0 if index > 0 else run_cells(cells, words)
    ranks = started_ranks(cfg)
    if index > 0:
        try:
            ranks.follow()
        except Interrupted:
            return INTERRUPTED
        return 0
    try:
        return run_cells(cells, words)
    finally:
        ranks.dismiss()
