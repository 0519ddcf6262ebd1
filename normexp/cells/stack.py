"""A stack: runs that are trained together, resumed from their checkpoint, and recorded."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf

from normexp.batching.replicas import suitable_threads
from normexp.build import plain
from normexp.cells.assembly import OnSteps, build_callbacks, build_module, resume_replicas
from normexp.cells.cell import Cell
from normexp.cells.logs import messages_to_file
from normexp.cells.trackers import open_loggers, wandb_runs
from normexp.records.committed import (
    commit_results,
    interrupted_stacks,
    publish_results,
    shared_dir,
    write_members,
)
from normexp.records.environment import describe_environment
from normexp.records.files import open_atomic, write_config, write_evaluation
from normexp.records.metrics import MetricsWriter
from normexp.records.paths import (
    CHECKPOINT_FILE,
    LOG_FILE,
    METRICS_FILE,
    WEIGHTS_FILE,
    checkpointed_stacks,
    seed_dir,
    stack_dir,
)
from normexp.records.result import Result
from normexp.training.fit import fit
from normexp.training.module import TrainingModule
from normexp.training.recorder import Recorder, RunSink
from normexp.training.stopping import Interrupted, StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stack:
    """Runs that are trained together: seeds of one cell, or of cells that differ only in `lr`."""

    parts: list[tuple[Cell, list[int]]]

    @property
    def cell(self) -> Cell:
        """The first cell; all cells share everything except id, record and learning rate."""
        return self.parts[0][0]

    @property
    def runs(self) -> list[tuple[Cell, int]]:
        """Cell and seed of each replica."""
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
        """The learning rate of each replica; None if they share the cell's."""
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
    """`train_together` for seeds of one cell."""
    return train_together(Stack([(cell, seeds)]), notes, stop, on_steps)


def train_together(
    stack: Stack,
    notes: Sequence[str] = (),
    stop: StopRequest | None = None,
    on_steps: OnSteps | None = None,
) -> list[Result]:
    """Trains a stack, from its checkpoint if there is one, and writes the records of its runs.

    Args:
        notes: messages from preparing the cell, for the log.
        stop: a stop request that other threads can set too.
        on_steps: shows the progress; None: a progress bar does.

    Returns:
        A result for each run.

    Raises:
        Interrupted: stopped with a checkpoint, from which the next call resumes.
    """
    _prepare_folders(stack)
    stop = stop or StopRequest()
    with messages_to_file(stack.directory / LOG_FILE):
        for note in notes:
            logger.info(note)
        with suitable_threads(stack.cell.elements_per_forward), stop.listening():
            return _train(stack, stop, on_steps)


def follow_stack(cell: Cell, seeds: list[int], stop: StopRequest | None = None) -> None:
    """Runs `train_stack` in the other processes of a training: writes nothing."""
    stack = Stack([(cell, seeds)])
    with suitable_threads(cell.elements_per_forward):
        module = _build(stack, Recorder([[] for _ in seeds]))
        _fit(stack, module, stop or StopRequest(), on_steps=lambda *_: None)


def _train(stack: Stack, stop: StopRequest, on_steps: OnSteps | None) -> list[Result]:
    if torch.cuda.is_initialized():  # asking would wake a GPU that is not in use
        torch.cuda.reset_peak_memory_stats()
    folders = [seed_dir(cell.directory, seed) for cell, seed in stack.runs]
    sinks: list[list[RunSink]] = [[MetricsWriter(folder / METRICS_FILE)] for folder in folders]
    with wandb_runs(stack.runs) as tracked:
        for run_sinks, run in zip(sinks, tracked, strict=False):
            run_sinks.append(run)
        recorder = Recorder(sinks, open_loggers(stack.cell, stack.seeds))
        module = _build(stack, recorder)
        is_stopped = _fit(stack, module, stop, on_steps)
        results = _record(stack, module)
    if is_stopped:
        raise Interrupted
    return results


def _build(stack: Stack, recorder: Recorder) -> TrainingModule:
    replicas = resume_replicas(stack.cell, stack.seeds, stack.checkpoint)
    if not stack.checkpoint.is_file():
        recorder.truncate_after(-1)  # rows of an attempt that left no checkpoint
    return build_module(stack.cell, stack.seeds, replicas, recorder, stack.lrs)


def _fit(stack: Stack, module: TrainingModule, stop: StopRequest, on_steps: OnSteps | None) -> bool:
    cell = stack.cell
    return fit(
        module,
        checkpoint=stack.checkpoint,
        epochs=cell.plan.epochs,
        val_every_epochs=cell.cfg.val_every_epochs,
        trainer_options=plain(cell.cfg.trainer),
        loggers=list(module.recorder.loggers),
        callbacks=build_callbacks(cell, on_steps),
        stop=stop,
    )


def _prepare_folders(stack: Stack) -> None:
    stack.directory.mkdir(parents=True, exist_ok=True)
    if len(stack.parts) > 1:
        write_members(stack.directory, stack.members)
    for cell, seeds in stack.parts:
        write_config(cell.directory, OmegaConf.to_yaml(cell.cfg, resolve=True))
        for seed in seeds:
            seed_dir(cell.directory, seed).mkdir(exist_ok=True)
        remove_superseded(cell.directory, seeds, stack.directory)


def remove_superseded(cell_dir: Path, seeds: list[int], own: Path) -> None:
    """Removes checkpoints of other stacks that share a run, whose metrics are now rewritten.

    Args:
        own: the directory of this stack.
    """
    alone = checkpointed_stacks(cell_dir).items()
    superseded = [path for path, held in alone if set(held) & set(seeds)]
    runs = {(cell_dir.name, seed) for seed in seeds}
    shared = interrupted_stacks(cell_dir.parent)
    superseded += [path for path, members in shared if runs & set(members)]
    for directory in superseded:
        if directory != own:
            logger.info("the stack %s replaces %s", own.name, directory)
            (directory / CHECKPOINT_FILE).unlink(missing_ok=True)


def _record(stack: Stack, module: TrainingModule) -> list[Result]:
    """Writes weights and evaluations, then the result of every run: its presence means ended."""
    device = module.trainer.strategy.root_device
    environment = describe_environment(gpu_name(device))
    if module.batches.data.source_version:
        environment["data_source"] = module.batches.data.source_version
    timing = _timing(module) | peak_memory(device)
    results = []
    for index, (cell, seed) in enumerate(stack.runs):
        run_dir = seed_dir(cell.directory, seed)
        if cell.cfg.save_weights:
            with open_atomic(run_dir / WEIGHTS_FILE) as file:
                torch.save(module.replicas.replica(index).cpu().state_dict(), file)
        if cell.evaluation.adds:
            content = module.evaluator.content(module.metrics, index)
            write_evaluation(run_dir, content)
        results.append(_result_of(module, index, cell, seed, environment, timing))
    commit_results(stack.directory, results)
    for directory in dict.fromkeys(cell.directory for cell, _ in stack.runs):
        publish_results(directory)
    return results


def _result_of(
    module: TrainingModule,
    index: int,
    cell: Cell,
    seed: int,
    environment: dict[str, object],
    timing: dict[str, float],
) -> Result:
    """Returns the result of replica `index`."""
    metrics = {name: column[index] for name, column in module.metrics.items()}
    diverged_at = module.losses.diverged_at[index]
    if diverged_at is None and not all(map(math.isfinite, metrics.values())):
        diverged_at = module.step  # the last update broke the network, after its loss was taken
    return Result(
        cell_id=cell.id,
        seed=seed,
        status="finished" if diverged_at is None else "diverged",
        config=cell.record | {"stacked": module.replicas.is_stacked},
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        environment=environment,
        diverged_at_step=diverged_at,
        num_parameters=cell.num_parameters,
        timing=timing,
        invalid=cell.invalid,
    )


def _timing(module: TrainingModule) -> dict[str, float]:
    num_replicas, seconds = module.replicas.num_replicas, module.train_seconds
    samples = module.batches.num_samples_before(module.step) * num_replicas
    return {
        "train_seconds": seconds,
        "step_ms": 1000 * seconds / max(module.step, 1),
        "stack_size": num_replicas,
        "samples_per_second": samples / max(seconds, 1e-9),
    }


def gpu_name(device: torch.device) -> str | None:
    """Returns the name of the GPU that trained; None for a CPU, without waking a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def peak_memory(device: torch.device) -> dict[str, float]:
    """Returns `peak_memory_mb` of tensors on a GPU in 10^6 bytes, empty for a CPU.

    On a CPU only the peak of the whole process is known, and its largest cell sets it.
    """
    if device.type != "cuda":
        return {}
    return {"peak_memory_mb": torch.cuda.max_memory_allocated(device) / 1e6}
