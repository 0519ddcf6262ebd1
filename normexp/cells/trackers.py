"""Weights & Biases and TensorBoard, as a cell's config asks for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from pytorch_lightning.loggers import Logger

from normexp.cells.cell import Cell
from normexp.config.place import is_under_agent
from normexp.errors import UserError
from normexp.records.paths import seed_dir
from normexp.training.recorder import WandbRun

logger = logging.getLogger(__name__)


@contextmanager
def wandb_runs(runs: list[tuple[Cell, int]]) -> Iterator[list[WandbRun]]:
    """Opens a W&B run for each (cell, seed); none if not asked for, or under an agent.

    The runs that were opened are finished at the end, as failed ones if the block raises.
    """
    opened: list[WandbRun] = []
    has_failed = True
    try:
        for cell, seed in runs:
            if cell.cfg.logger.get("wandb") is not None and not is_under_agent():
                opened.append(_open_wandb_run(cell, seed))
        yield opened
        has_failed = False
    finally:
        for run in opened:
            run.finish(failed=has_failed)
    if opened and opened[0].mode == "offline":
        folder = runs[0][0].study_dir / "wandb"
        logger.info("W&B was offline; upload its runs later: wandb sync %s/offline-run-*", folder)


def _open_wandb_run(cell: Cell, seed: int) -> WandbRun:
    chosen = cell.cfg.logger.wandb
    invalid = ["INVALID"] if cell.invalid else []
    return WandbRun(
        project=chosen.project,
        entity=chosen.entity,
        mode=chosen.mode,
        directory=cell.study_dir,
        group=cell.id,
        seed=seed,
        id_file=seed_dir(cell.directory, seed) / "wandb-id",
        tags=[cell.record["norm"], cell.record["model"], cell.record["data"], *invalid],
        config=cell.record | {"seed": seed},
    )


def open_loggers(cell: Cell, seeds: list[int]) -> list[Logger]:
    """Opens the Lightning loggers of a stack, which get the mean over its runs."""
    if "tensorboard" not in cell.cfg.logger:
        return []
    from pytorch_lightning.loggers import TensorBoardLogger

    if find_spec("tensorboard") is None:
        raise UserError(
            "logger=tensorboard needs the package tensorboard; pip install 'normexp[tensorboard]'"
        )
    version = f"{seeds[0]}-{seeds[-1]}"
    return [TensorBoardLogger(cell.directory, name="tensorboard", version=version)]
