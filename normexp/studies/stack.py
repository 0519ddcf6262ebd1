"""Training the missing runs of a cell as one stack, and leaving their records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf

from normexp.batching.stacking import suitable_threads
from normexp.records.layout import CHECKPOINT_FILE, LOG_FILE, METRICS_FILE, seed_dir, stack_dir
from normexp.records.metrics import MetricsWriter
from normexp.records.result import Result
from normexp.records.writer import write_config
from normexp.studies.assembly import build_callbacks, build_replicas, build_task
from normexp.studies.cell import Cell
from normexp.studies.ending import forget_peak_memory, write_results
from normexp.studies.notes import logging_to
from normexp.studies.sinks import open_loggers, open_wandb_runs, tell_how_to_sync
from normexp.tasks.checkpoint import Interrupted
from normexp.tasks.evaluation import StatisticsEvaluation
from normexp.tasks.fit import fit
from normexp.tasks.recorder import Recorder, RunSink

logger = logging.getLogger(__name__)


def train_stack(cell: Cell, seeds: list[int], notes: Sequence[str] = ()) -> list[Result]:
    """Trains `seeds` of a cell together and writes their records; resumes from a checkpoint.

    Args:
        notes: what was noted while the cell was prepared, for the log.

    Raises:
        Interrupted: stopped by the user, with a checkpoint for the next call.
    """
    directory = stack_dir(cell.directory, seeds[0], seeds[-1])
    directory.mkdir(parents=True, exist_ok=True)
    write_config(cell.directory, OmegaConf.to_yaml(cell.cfg, resolve=True))
    for seed in seeds:
        seed_dir(cell.directory, seed).mkdir(exist_ok=True)
    remove_superseded(cell.directory, seeds)
    with logging_to(directory / LOG_FILE), suitable_threads(cell.elements_per_forward):
        for note in notes:
            logger.info(note)
        results = _train(cell, seeds, directory / CHECKPOINT_FILE)
    return results


def _train(cell: Cell, seeds: list[int], checkpoint: Path) -> list[Result]:
    cfg = cell.cfg
    forget_peak_memory()
    replicas = build_replicas(cell, seeds, is_stacked=form_of(checkpoint))
    writers = [MetricsWriter(seed_dir(cell.directory, seed) / METRICS_FILE) for seed in seeds]
    if not checkpoint.is_file():
        for writer in writers:
            writer.truncate_after(-1)  # what a run without a checkpoint left behind
    wandb_runs = open_wandb_runs(cell, seeds)
    loggers = open_loggers(cell, seeds)
    sinks: list[list[RunSink]] = [[writer] for writer in writers]
    for run_sinks, wandb_run in zip(sinks, wandb_runs, strict=False):
        run_sinks.append(wandb_run)
    task = build_task(cell, seeds, replicas, Recorder(sinks, loggers))
    evaluation = StatisticsEvaluation(cell.evaluation)
    finished = False
    try:
        stopped = fit(
            task,
            checkpoint=checkpoint,
            epochs=cell.plan.epochs,
            val_every_epochs=cfg.val_every_epochs,
            trainer_options=OmegaConf.to_container(cfg.trainer, resolve=True),  # type: ignore[arg-type]
            loggers=loggers,
            callbacks=[*build_callbacks(cell), evaluation],
        )
        results = write_results(cell, seeds, task, evaluation)
        checkpoint.unlink(missing_ok=True)
        finished = True
    finally:
        for wandb_run in wandb_runs:
            wandb_run.finish(failed=not finished)
    tell_how_to_sync(cell, wandb_runs)
    if stopped:
        raise Interrupted
    return results


def form_of(checkpoint: Path) -> bool | None:
    """Whether the stack of a checkpoint was stacked; None without one, or where it is unreadable.

    An unreadable checkpoint is set aside, so that the stack starts over.
    """
    if not checkpoint.is_file():
        return None
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        return bool(content["normexp"]["is_stacked"])
    except Exception as error:  # torn or foreign: torch raises many kinds
        aside = checkpoint.with_suffix(".unreadable")
        checkpoint.replace(aside)
        logger.warning(
            "%s cannot be read (%s); it is kept as %s and the stack starts over",
            checkpoint,
            type(error).__name__,
            aside.name,
        )
        return None


def remove_superseded(cell_directory: Path, seeds: list[int]) -> None:
    """Checkpoints of other stacks that hold one of these seeds: this stack rewrites its metrics."""
    for path in cell_directory.glob(f"stacks/*/{CHECKPOINT_FILE}"):
        first, _, last = path.parent.name.partition("-")
        overlaps = int(first) <= seeds[-1] and seeds[0] <= int(last)
        if overlaps and path.parent != stack_dir(cell_directory, seeds[0], seeds[-1]):
            logger.info("%s is superseded by the stack %d-%d", path, seeds[0], seeds[-1])
            path.unlink()
