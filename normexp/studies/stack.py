"""Training the missing runs of a cell as one stack, and leaving their records."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from normexp.batching.stacking import suitable_threads
from normexp.records.layout import CHECKPOINT_FILE, LOG_FILE, METRICS_FILE, seed_dir, stack_dir
from normexp.records.metrics import MetricsWriter
from normexp.records.result import Result
from normexp.records.writer import write_config
from normexp.studies.assembly import build_callbacks, build_replicas, build_task
from normexp.studies.cell import Cell
from normexp.studies.ending import write_results
from normexp.studies.sinks import logging_to, open_loggers, open_wandb_runs, tell_how_to_sync
from normexp.tasks.evaluation import StatisticsEvaluation
from normexp.tasks.fit import fit
from normexp.tasks.recorder import Recorder, RunSink


def train_stack(cell: Cell, seeds: list[int]) -> list[Result]:
    """Trains `seeds` of a cell together and writes their records; resumes from a checkpoint.

    Raises:
        Interrupted: stopped by the user, with a checkpoint for the next call.
    """
    directory = stack_dir(cell.directory, seeds[0], seeds[-1])
    directory.mkdir(parents=True, exist_ok=True)
    write_config(cell.directory, OmegaConf.to_yaml(cell.cfg, resolve=True))
    for seed in seeds:
        seed_dir(cell.directory, seed).mkdir(exist_ok=True)
    with logging_to(directory / LOG_FILE), suitable_threads(cell.elements_per_forward):
        results = _train(cell, seeds, directory / CHECKPOINT_FILE)
    (directory / CHECKPOINT_FILE).unlink(missing_ok=True)
    return results


def _train(cell: Cell, seeds: list[int], checkpoint: Path) -> list[Result]:
    cfg = cell.cfg
    replicas = build_replicas(cell, seeds)
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
        fit(
            task,
            checkpoint=checkpoint,
            epochs=cell.plan.epochs,
            val_every_epochs=cfg.val_every_epochs,
            trainer_options=OmegaConf.to_container(cfg.trainer, resolve=True),  # type: ignore[arg-type]
            loggers=loggers,
            callbacks=[*build_callbacks(cell), evaluation],
        )
        results = write_results(cell, seeds, task, evaluation)
        finished = True
    finally:
        for wandb_run in wandb_runs:
            wandb_run.finish(failed=not finished)
    tell_how_to_sync(cell, wandb_runs)
    return results
