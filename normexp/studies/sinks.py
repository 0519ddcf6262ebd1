"""Where the rows of a stack go beside metrics.csv: W&B and TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from pytorch_lightning.loggers import Logger

from normexp.errors import UserError
from normexp.records.layout import seed_dir
from normexp.studies.cell import Cell
from normexp.studies.wandb_agent import is_under_agent
from normexp.tasks.wandb_run import WandbRun

logger = logging.getLogger(__name__)


def open_wandb_runs(cell: Cell, seeds: list[int]) -> Iterator[WandbRun]:
    """A W&B run per seed, opened as it comes; none where an agent has its own, or none is asked."""
    chosen = cell.cfg.logger.get("wandb")
    if chosen is None or is_under_agent():
        return
    invalid = ["INVALID"] if cell.invalid else []
    for seed in seeds:
        yield WandbRun(
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


def tell_how_to_sync(cell: Cell, wandb_runs: Sequence[WandbRun]) -> None:
    """One line where W&B was offline."""
    if wandb_runs and wandb_runs[0].mode == "offline":
        folder = cell.study_dir / "wandb"
        logger.info("W&B was offline; send its runs later: wandb sync %s/offline-run-*", folder)


def open_loggers(cell: Cell, seeds: list[int]) -> list[Logger]:
    """Lightning's loggers that were asked for; they get the mean over the stack."""
    if "tensorboard" not in cell.cfg.logger:
        return []
    from pytorch_lightning.loggers import TensorBoardLogger

    if find_spec("tensorboard") is None:
        raise UserError(
            "logger=tensorboard needs the package tensorboard; pip install 'normexp[tensorboard]'"
        )
    version = f"{seeds[0]}-{seeds[-1]}"
    return [TensorBoardLogger(cell.directory, name="tensorboard", version=version)]
