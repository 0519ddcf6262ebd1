"""Training missing runs as one stack, and leaving their records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from normexp.batching.stacking import suitable_threads
from normexp.records.layout import (
    CHECKPOINT_FILE,
    LOG_FILE,
    METRICS_FILE,
    checkpointed_stacks,
    seed_dir,
    stack_dir,
)
from normexp.records.metrics import MetricsWriter
from normexp.records.result import Result
from normexp.records.shared import interrupted_stacks, shared_dir, write_members
from normexp.records.writer import write_config
from normexp.studies.assembly import build_callbacks, build_task
from normexp.studies.cell import Cell
from normexp.studies.ending import forget_peak_memory, write_results
from normexp.studies.notes import logging_to
from normexp.studies.resuming import resumed_replicas
from normexp.studies.sinks import open_loggers, open_wandb_runs, tell_how_to_sync
from normexp.tasks.evaluation import StatisticsEvaluation
from normexp.tasks.fit import fit
from normexp.tasks.pruning import Pruned
from normexp.tasks.recorder import Recorder, RunSink
from normexp.tasks.stopping import Interrupted, StopRequest
from normexp.tasks.wandb_run import WandbRun

logger = logging.getLogger(__name__)

OnSteps = Callable[[int, int], None]


@dataclass(frozen=True)
class Stack:
    """Runs that are trained together: seeds of one cell, or of cells that differ in `lr` alone."""

    parts: list[tuple[Cell, list[int]]]

    @property
    def cell(self) -> Cell:
        """One that stands for all: they share everything but their id, record and learning rate."""
        return self.parts[0][0]

    @property
    def runs(self) -> list[tuple[Cell, int]]:
        """The runs in the order of the replicas."""
        return [(cell, seed) for cell, seeds in self.parts for seed in seeds]

    @property
    def seeds(self) -> list[int]:
        """The seed of each replica."""
        return [seed for _, seed in self.runs]

    @property
    def members(self) -> list[tuple[str, int]]:
        return [(cell.id, seed) for cell, seed in self.runs]

    @property
    def lrs(self) -> list[float] | None:
        """The learning rate of each replica; None where it is the cell's."""
        return None if len(self.parts) == 1 else [cell.plan.lr for cell, _ in self.runs]

    @property
    def directory(self) -> Path:
        if len(self.parts) > 1:
            return shared_dir(self.cell.study_dir, self.members)
        return stack_dir(self.cell.directory, self.seeds[0], self.seeds[-1])

    @property
    def checkpoint(self) -> Path:
        return self.directory / CHECKPOINT_FILE


def train_stack(
    cell: Cell,
    seeds: list[int],
    notes: Sequence[str] = (),
    stop: StopRequest | None = None,
    on_steps: OnSteps | None = None,
) -> list[Result]:
    """As `train_together`, for `seeds` of one cell."""
    return train_together(Stack([(cell, seeds)]), notes, stop, on_steps)


def train_together(
    stack: Stack,
    notes: Sequence[str] = (),
    stop: StopRequest | None = None,
    on_steps: OnSteps | None = None,
) -> list[Result]:
    """Trains a stack and writes the records of its runs; resumes from its checkpoint.

    Args:
        notes: what was noted while the cell was prepared, for the log.
        stop: where somebody beside Ctrl-C may ask to stop.
        on_steps: shows the progress in place of a bar, see `outcome.Listener`.

    Returns:
        A result for each run; none where a search ended the trial early.

    Raises:
        Interrupted: stopped by the user, with a checkpoint for the next call.
    """
    stack.directory.mkdir(parents=True, exist_ok=True)
    if len(stack.parts) > 1:
        write_members(stack.directory, stack.members)
    for cell, seeds in stack.parts:
        write_config(cell.directory, OmegaConf.to_yaml(cell.cfg, resolve=True))
        for seed in seeds:
            seed_dir(cell.directory, seed).mkdir(exist_ok=True)
        remove_superseded(cell.directory, seeds, stack.directory)
    stop = stop or StopRequest()
    log, size = stack.directory / LOG_FILE, stack.cell.elements_per_forward
    with logging_to(log), suitable_threads(size):
        for note in notes:
            logger.info(note)
        with stop.listening():  # also while results are written, which a stop must not cost
            return _train(stack, stop, on_steps)


def _train(stack: Stack, stop: StopRequest, on_steps: OnSteps | None) -> list[Result]:
    cell, seeds, checkpoint = stack.cell, stack.seeds, stack.checkpoint
    cfg = cell.cfg
    forget_peak_memory()
    replicas = resumed_replicas(cell, seeds, checkpoint)
    folders = [seed_dir(of.directory, seed) for of, seed in stack.runs]
    writers = [MetricsWriter(folder / METRICS_FILE) for folder in folders]
    if not checkpoint.is_file():
        for writer in writers:
            writer.truncate_after(-1)  # what a run without a checkpoint left behind
    evaluation = StatisticsEvaluation(cell.evaluation)
    wandb_runs: list[WandbRun] = []
    finished = False
    try:
        for of, own in stack.parts:
            wandb_runs.extend(open_wandb_runs(of, own))  # those that opened, should one fail
        loggers = open_loggers(cell, seeds)
        sinks: list[list[RunSink]] = [[writer] for writer in writers]
        for run_sinks, wandb_run in zip(sinks, wandb_runs, strict=False):
            run_sinks.append(wandb_run)
        task = build_task(cell, seeds, replicas, Recorder(sinks, loggers), stack.lrs)
        stopped = fit(
            task,
            checkpoint=checkpoint,
            epochs=cell.plan.epochs,
            val_every_epochs=cfg.val_every_epochs,
            trainer_options=OmegaConf.to_container(cfg.trainer, resolve=True),  # type: ignore[arg-type]
            loggers=loggers,
            callbacks=[*build_callbacks(cell, on_steps), evaluation],
            stop=stop,
        )
        results = write_results(stack.runs, stack.directory, task, evaluation)
        finished = True
    except Pruned as pruned:
        logger.info("ended early after %s", pruned)
        checkpoint.unlink(missing_ok=True)  # a trial that goes on after a kill ends here again
        return []
    finally:
        for wandb_run in wandb_runs:
            wandb_run.finish(failed=not finished)
    tell_how_to_sync(cell, wandb_runs)
    if stopped:
        raise Interrupted
    return results


def remove_superseded(cell_dir: Path, seeds: list[int], own: Path) -> None:
    """Checkpoints of other stacks that hold one of these runs: this stack rewrites its metrics.

    Args:
        own: the directory of this stack.
    """
    found: list[Path] = []
    for directory, held in checkpointed_stacks(cell_dir).items():
        if held[0] <= seeds[-1] and seeds[0] <= held[-1]:
            found.append(directory)
    for directory, members in interrupted_stacks(cell_dir.parent):
        if any((cell_dir.name, seed) in members for seed in seeds):
            found.append(directory)
    for directory in found:
        if directory != own:
            logger.info("%s is superseded by the stack %s", directory, own.name)
            (directory / CHECKPOINT_FILE).unlink(missing_ok=True)
