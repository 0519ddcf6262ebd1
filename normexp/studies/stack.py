"""Training the missing runs of a cell as one stack, and leaving their records."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger
from torch import nn

from normexp.batching.draws import derive_seed
from normexp.batching.replicas import InTurn, Replicas, Stacked
from normexp.batching.stacking import stacks
from normexp.build import build_optimizer
from normexp.data.batches import TrainingBatches
from normexp.records.environment import describe_environment
from normexp.records.layout import (
    CHECKPOINT_FILE,
    LOG_FILE,
    METRICS_FILE,
    WEIGHTS_FILE,
    seed_dir,
    stack_dir,
)
from normexp.records.metrics import MetricsWriter
from normexp.records.result import Result
from normexp.records.writer import (
    open_atomic,
    write_config,
    write_evaluation,
    write_result,
)
from normexp.studies.cell import Cell
from normexp.tasks.classification import Classification
from normexp.tasks.diagnostics import Diagnostics
from normexp.tasks.evaluation import StatisticsEvaluation
from normexp.tasks.fit import fit
from normexp.tasks.language_modeling import LanguageModeling
from normexp.tasks.optimizer import Schedule
from normexp.tasks.progress import TrainingProgress
from normexp.tasks.recorder import Recorder, RunSink
from normexp.tasks.training import Recipe, TrainingTask
from normexp.tasks.wandb_run import WandbRun

logger = logging.getLogger(__name__)

TASKS = {"classification": Classification, "language_modeling": LanguageModeling}


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
    with logging_to(directory / LOG_FILE):
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
    wandb_runs = _wandb_runs(cell, seeds)
    loggers = _lightning_loggers(cell, seeds)
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
        results = _write_results(cell, seeds, task, evaluation)
        finished = True
    finally:
        for wandb_run in wandb_runs:
            wandb_run.finish(failed=not finished)
    if wandb_runs and wandb_runs[0].mode == "offline":
        folder = cell.study_dir / "wandb"
        logger.info("W&B was offline; send its runs later: wandb sync %s/offline-run-*", folder)
    return results


def build_task(
    cell: Cell, seeds: list[int], replicas: Replicas, recorder: Recorder
) -> TrainingTask:
    """What trains and evaluates replicas of these seeds."""
    batches = TrainingBatches(
        cell.data, seeds, cell.plan.sizes.batch_size, drop_last=cell.cfg.drop_last
    )
    return TASKS[cell.data.task](replicas, cell.data, batches, build_recipe(cell), recorder)


def build_callbacks(cell: Cell) -> list[Callback]:
    """What watches the training."""
    callbacks: list[Callback] = [TrainingProgress(cell.title, cell.plan.epochs)]
    if cell.cfg.diagnostics:
        callbacks.append(Diagnostics(cell.cfg.diagnostics, elementwise=not cell.traits.pools))
    return callbacks


def build_replicas(cell: Cell, seeds: list[int]) -> Replicas:
    """One new network per seed, in the form that the rule of `stacks` chooses."""
    return arrange_replicas(cell, seeds, [cell.build(seed) for seed in seeds])


def arrange_replicas(cell: Cell, seeds: list[int], networks: list[nn.Module]) -> Replicas:
    """The networks of `seeds`, in the form that the rule of `stacks` chooses."""
    elements = cell.plan.sizes.micro * cell.traits.elements_per_sample
    wanted = cell.cfg.stack
    if wanted == "auto":
        wanted = stacks(_device_type(cell.cfg.trainer.accelerator), len(seeds), elements)
    if wanted and len(seeds) > 1:
        if cell.traits.stacking_obstacle is None:
            return Stacked(networks)
        logger.info("replicas run one after another: %s", cell.traits.stacking_obstacle)
    in_turn = InTurn(networks)
    if cell.traits.draws_for_itself:
        in_turn.foreign_seeds = [derive_seed(seed, "foreign") for seed in seeds]
    return in_turn


def build_recipe(cell: Cell) -> Recipe:
    """How the cell is trained, from its config."""
    cfg = cell.cfg
    return Recipe(
        sizes=cell.plan.sizes,
        optimizer=build_optimizer(cfg, momentum=cell.plan.optimizer_momentum),
        schedule=Schedule(cfg.optim.schedule, cfg.optim.warmup, cell.plan.num_steps),
        lr=cell.plan.lr,
        weight_decay=cfg.optim.weight_decay,
        decay_norm=cfg.optim.decay_norm,
        max_grad_norm=cfg.max_grad_norm,
        log_every=cfg.log_every,
        max_chunk=cfg.chunk,
    )


def _device_type(accelerator: str) -> str:
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if accelerator == "gpu" else accelerator


def _write_results(
    cell: Cell, seeds: list[int], task: TrainingTask, evaluation: StatisticsEvaluation
) -> list[Result]:
    """Weights, evaluations, then result.json of every run: its presence means ended."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    environment = describe_environment(gpu)
    if cell.data.source_version:
        environment["data_source"] = cell.data.source_version
    timing = _timing(task, len(seeds))
    results = []
    for index, seed in enumerate(seeds):
        run_dir = seed_dir(cell.directory, seed)
        if cell.cfg.save_weights:
            with open_atomic(run_dir / WEIGHTS_FILE) as file:
                torch.save(task.replicas.replica(index).cpu().state_dict(), file)
        if cell.evaluation.adds:
            write_evaluation(run_dir, evaluation.content(task, index))
        diverged_at = task.diverged_at[index]
        finals = {name: column[index] for name, column in task.final.items()}
        result = Result(
            cell_id=cell.id,
            seed=seed,
            status="finished" if diverged_at is None else "diverged",
            config=cell.record | {"stacked": task.replicas.is_stacked},
            metrics={name: value for name, value in finals.items() if math.isfinite(value)},
            environment=environment,
            diverged_at_step=diverged_at,
            num_parameters=cell.num_parameters,
            timing=timing,
            invalid=cell.invalid,
        )
        write_result(run_dir, result)
        results.append(result)
    return results


def _timing(task: TrainingTask, num_replicas: int) -> dict[str, float]:
    samples = task.batches.num_samples_before(task.step) * num_replicas
    return {
        "train_seconds": task.train_seconds,
        "step_ms": 1000 * task.train_seconds / max(task.step, 1),
        "stack_size": num_replicas,
        "samples_per_second": samples / max(task.train_seconds, 1e-9),
    }


def _wandb_runs(cell: Cell, seeds: list[int]) -> list[WandbRun]:
    chosen = cell.cfg.logger.get("wandb")
    if chosen is None:
        return []
    invalid = ["INVALID"] if cell.invalid else []
    return [
        WandbRun(
            project=chosen.project,
            entity=chosen.entity,
            mode=chosen.mode,
            directory=cell.study_dir,
            group=cell.id,
            seed=seed,
            tags=[cell.record["norm"], cell.record["model"], cell.record["data"], *invalid],
            config=cell.record | {"seed": seed},
        )
        for seed in seeds
    ]


def _lightning_loggers(cell: Cell, seeds: list[int]) -> list[Logger]:
    if "tensorboard" not in cell.cfg.logger:
        return []
    from pytorch_lightning.loggers import TensorBoardLogger

    version = f"{seeds[0]}-{seeds[-1]}"
    return [TensorBoardLogger(cell.directory, name="tensorboard", version=version)]


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """The log of normexp's own modules into a file, appended, while inside."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("normexp")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        handler.close()
