"""The loggers of a cell besides metrics.csv: Weights & Biases, TensorBoard and the user's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from normexp.build import build_logger
from normexp.cells.cell import Cell
from normexp.config.process import is_under_agent
from normexp.records.paths import seed_dir
from normexp.records.result import hyperparameters
from normexp.training.recorder import OwnRun, RunSink, WandbRun, resolve_mode, tensorboard

logger = logging.getLogger(__name__)


@contextmanager
def run_loggers(cell: Cell, seed: int) -> Iterator[list[RunSink]]:
    """The loggers of one run, which are finished at the end, as failed if the block raises."""
    chosen = cell.cfg.logger
    opened: list[WandbRun | OwnRun] = []
    has_failed = True
    try:
        if "wandb" in chosen and not is_under_agent():
            opened.append(_wandb_run(cell, seed))
        if "custom" in chosen and chosen.custom.per == "run":
            place = _place(cell, f"seed-{seed}", seed_dir(cell.directory, seed))
            params = _params(cell) | {"seed": seed}
            opened.append(OwnRun(build_logger(cell.cfg, place), params))
        yield list(opened)
        has_failed = False
    finally:
        for run in opened:
            run.finish(failed=has_failed)


def _wandb_run(cell: Cell, seed: int) -> WandbRun:
    chosen, config = cell.cfg.logger.wandb, _params(cell) | {"seed": seed}
    named = [config[key] for key in ("norm", "model", "data", "study", "experiment")]
    marks = [*(cell.cfg.tags or []), *(["INVALID"] if cell.invalid else [])]
    return WandbRun(
        mode=chosen.mode,
        directory=cell.study_dir,
        id_file=seed_dir(cell.directory, seed) / "wandb-id",
        tags=list(dict.fromkeys(str(tag) for tag in (*named, *marks) if tag)),
        config=config,
        project=chosen.project,
        entity=chosen.entity,
        name=f"{chosen.name or cell.id}/seed-{seed}",
        group=chosen.group or cell.id,  # W&B's grouping shows mean and spread over seeds
        notes=cell.cfg.notes,
    )


def stack_loggers(cell: Cell, seeds: Sequence[int]) -> list[Logger]:
    """The Lightning loggers of a stack, which get the mean over its runs; says what gets what."""
    first, last = seeds[0], seeds[-1]
    version = f"seed-{first}" if first == last else f"mean-of-seeds-{first}-to-{last}"
    params = _params(cell) | {"curves": version.replace("-", " ")}
    chosen, opened = cell.cfg.logger, list[Logger]()
    if "wandb" in chosen and not is_under_agent() and resolve_mode(chosen.wandb.mode) == "offline":
        folder = cell.study_dir / "wandb"
        logger.info("W&B is offline; upload its runs later: wandb sync %s/offline-run-*", folder)
    if "tensorboard" in chosen:
        opened.append(tensorboard(cell.directory, version))
    if "custom" in chosen:
        per_cell = chosen.custom.per == "cell"
        logger.info("logger=custom gets %s", params["curves"] if per_cell else "each run by itself")
        if per_cell:
            opened.append(build_logger(cell.cfg, _place(cell, version, cell.directory)))
    for one in opened:
        one.log_hyperparams(params)
    return opened


def _params(cell: Cell) -> dict[str, Any]:
    cfg = cell.cfg
    return hyperparameters(cell.record, study=cfg.study, experiment=cfg.get("experiment"))


def _place(cell: Cell, version: str, folder: Path) -> dict[str, Any]:
    """What loggers call their run and where they write, by the names of their arguments."""
    return {
        "save_dir": str(folder),
        "name": cell.id,
        "version": version,
        "experiment_name": cell.cfg.study,
        "run_name": f"{cell.id}/{version}",
    }
