"""Training missing runs as one stack, and leaving their records."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger
from torch import nn

from normexp.batching.draws import derive_seed
from normexp.batching.replicas import InTurn, Replicas, Stacked, stacks, suitable_threads
from normexp.build import build_optimizer, synchronized
from normexp.cells.cell import Cell
from normexp.cells.notes import logging_to
from normexp.config.place import is_under_agent
from normexp.config.spec import one_line
from normexp.data.batches import TrainingBatches
from normexp.errors import UserError
from normexp.records.committed import commit_results, publish_results
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
from normexp.records.result import Result, interrupted_stacks, shared_dir, write_members
from normexp.reporting.metric import describe_metric
from normexp.training.compilation import set_matmul_precision
from normexp.training.diagnostics import Diagnostics
from normexp.training.evaluation import StatisticsEvaluation
from normexp.training.fit import device_type, fit
from normexp.training.module import Classification, LanguageModeling, Recipe, TrainingTask
from normexp.training.optim import Schedule
from normexp.training.progress import StepReports, TrainingProgress
from normexp.training.pruning import Pruned, Pruner
from normexp.training.recorder import Recorder, RunSink, WandbRun
from normexp.training.stopping import Interrupted, StopRequest

logger = logging.getLogger(__name__)

# Optimizers of torch that update each value from its own history alone.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")

TASKS = {"classification": Classification, "language_modeling": LanguageModeling}


def build_task(
    cell: Cell,
    seeds: list[int],
    replicas: Replicas,
    recorder: Recorder,
    lrs: Sequence[float] | None = None,
) -> TrainingTask:
    """What trains and evaluates replicas of these seeds.

    Args:
        lrs: each replica's own learning rate; None: the cell's.
    """
    batches = TrainingBatches(
        cell.data, seeds, cell.plan.sizes.batch_size, drop_last=cell.cfg.drop_last
    )
    recipe = build_recipe(cell)
    if lrs is not None:
        highest = max(lrs)
        scales = tuple(lr / highest for lr in lrs)
        recipe = dataclasses.replace(recipe, lr=highest, lr_scales=scales)
    return TASKS[cell.data.task](replicas, cell.data, batches, recipe, recorder)


def build_callbacks(
    cell: Cell, on_steps: Callable[[int, int], None] | None = None
) -> list[Callback]:
    """What watches the training.

    Args:
        on_steps: shows the progress in place of a bar, see `outcome.Listener`.
    """
    bar = TrainingProgress(cell.title, cell.plan.epochs)
    callbacks: list[Callback] = [bar if on_steps is None else StepReports(on_steps)]
    if cell.cfg.diagnostics:
        callbacks.append(Diagnostics(cell.cfg.diagnostics, elementwise=not cell.traits.pools))
    if cell.cfg.tune.get("thresholds"):  # of a search that ends trials early
        metric = describe_metric(cell.cfg.tune.metric)
        higher = metric.higher_is_better
        callbacks.append(Pruner(metric.name, cell.cfg.tune.thresholds, higher_is_better=higher))
    return callbacks


def build_replicas(cell: Cell, seeds: list[int], *, is_stacked: bool | None = None) -> Replicas:
    """One new network per seed, in the form that the rule of `stacks` chooses.

    Args:
        is_stacked: the form of the checkpoint to resume from, which then counts; None without one.
    """
    networks = [cell.build(seed) for seed in seeds]
    return arrange_replicas(cell, seeds, networks, is_stacked=is_stacked)


def arrange_replicas(
    cell: Cell, seeds: list[int], networks: list[nn.Module], *, is_stacked: bool | None = None
) -> Replicas:
    """The networks of `seeds`, in the form that the rule of `stacks` chooses."""
    device = device_type(cell.cfg.trainer.accelerator)
    set_matmul_precision(cell.cfg.get("matmul_precision", "high"), device)
    if will_stack(cell, len(seeds), is_stacked=is_stacked):
        return Stacked(networks)
    in_turn = InTurn(networks)
    if cell.traits.draws_for_itself:
        in_turn.foreign_seeds = [derive_seed(seed, "foreign") for seed in seeds]
    return in_turn


def will_stack(cell: Cell, num_replicas: int, *, is_stacked: bool | None = None) -> bool:
    """Whether so many replicas are stacked; a note says what stands against it."""
    wanted = cell.cfg.stack if is_stacked is None else is_stacked
    if wanted == "auto":
        device = device_type(cell.cfg.trainer.accelerator)
        wanted = stacks(device, num_replicas, cell.elements_per_forward)
    if not wanted or num_replicas == 1:
        return False
    obstacle = _obstacle_of_devices(cell) or cell.traits.stacking_obstacle
    obstacle = obstacle or _obstacle_of_optimizer(cell)
    if obstacle is not None:
        logger.info("replicas run one after another: %s", obstacle)
    return obstacle is None


def _obstacle_of_devices(cell: Cell) -> str | None:
    """A norm that exchanges sums with other devices cannot do so under vmap."""
    if cell.num_devices > 1 and synchronized(cell.cfg):
        return "the norm takes statistics over all devices"
    return None


def _obstacle_of_optimizer(cell: Cell) -> str | None:
    """Why a stack would not be trained as its runs alone; None for what acts value by value."""
    name = str(cell.cfg.optim._target_).rpartition(".")[2]
    if name in ELEMENTWISE:
        return None
    return f"{name} is not known to act value by value"


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
        eval_group=cell.plan.sizes.norm if cell.traits.mixes_samples_in_evaluation else None,
        log_every=cfg.log_every,
        max_chunk=cfg.chunk,
        compile=cfg.get("compile", False),
    )


def write_results(
    runs: Sequence[tuple[Cell, int]],
    stack_dir: Path,
    task: TrainingTask,
    evaluation: StatisticsEvaluation,
) -> list[Result]:
    """Weights and evaluations, then result.json of every run: its presence means ended.

    The stack's results are committed together before the first of them is written, so that its
    runs end together; the checkpoint goes.

    Args:
        runs: cell and seed of each replica.
    """
    environment = describe_environment(gpu_name(task.trainer.strategy.root_device))
    if task.data.source_version:
        environment["data_source"] = task.data.source_version
    timing = _timing(task, len(runs))
    results = []
    for index, (cell, seed) in enumerate(runs):
        run_dir = seed_dir(cell.directory, seed)
        if cell.cfg.save_weights:
            with open_atomic(run_dir / WEIGHTS_FILE) as file:
                torch.save(task.replicas.replica(index).cpu().state_dict(), file)
        if cell.evaluation.adds:
            write_evaluation(run_dir, evaluation.content(task, index))
        diverged_at = task.losses.diverged_at[index]
        finals = {name: column[index] for name, column in task.final.items()}
        if diverged_at is None and not all(map(math.isfinite, finals.values())):
            diverged_at = task.step  # the last update broke what its loss could not show yet
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
        results.append(result)
    commit_results(stack_dir, results)
    for directory in dict.fromkeys(cell.directory for cell, _ in runs):
        publish_results(directory)
    return results


def _timing(task: TrainingTask, num_replicas: int) -> dict[str, float]:
    samples = task.batches.num_samples_before(task.step) * num_replicas
    return {
        "train_seconds": task.train_seconds,
        "step_ms": 1000 * task.train_seconds / max(task.step, 1),
        "stack_size": num_replicas,
        "samples_per_second": samples / max(task.train_seconds, 1e-9),
        **peak_memory(task.trainer.strategy.root_device),
    }


def gpu_name(device: torch.device) -> str | None:
    """Of the GPU that trained; to ask on a CPU would wake a GPU that has nothing to do with it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def forget_peak_memory() -> None:
    """Starts the count of a new stack; does not wake a GPU that nobody has used yet."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: torch.device) -> dict[str, float]:
    """`peak_memory_mb`: most memory that tensors held since then, in 10^6 bytes; GPUs alone.

    On a CPU there is only the peak of the process since its start, which is that of the largest
    cell so far, so nothing is recorded.
    """
    if device.type != "cuda":
        return {}
    return {"peak_memory_mb": torch.cuda.max_memory_allocated(device) / 1e6}


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


# What is read as a training resumes: by Lightning, and under `normexp` by the task.
PARTS = {"pytorch-lightning_version", "state_dict", "optimizer_states", "lr_schedulers", "loops"}
OWN_PARTS = {"losses", "train_seconds", "validated_at", "is_stacked", "final"}
REPLICAS = "replicas."  # what the task's state_dict calls them


def resumed_replicas(cell: Cell, seeds: list[int], checkpoint: Path) -> Replicas:
    """One new network per seed, in the form of the checkpoint where there is one that fits.

    One that does not fit is set aside, so that the stack starts over.
    """
    found = fitting_replicas(cell, seeds, checkpoint)
    if found is None:
        return build_replicas(cell, seeds)
    replicas, done = found
    logger.info("%s continues from step %d of %d", cell.title, done, cell.plan.num_steps)
    return replicas


def fitting_replicas(cell: Cell, seeds: list[int], checkpoint: Path) -> tuple[Replicas, int] | None:
    """New networks that a checkpoint fits, and its step; None without one, or once set aside."""
    content = read_checkpoint(checkpoint)
    if content is None:
        return None
    replicas = build_replicas(cell, seeds, is_stacked=content["normexp"]["is_stacked"])
    if _shapes(content["state_dict"]) != _shapes(replicas.state_dict(prefix=REPLICAS)):
        set_aside(checkpoint, "it is of other networks")
        return None
    if not _fits(content["optimizer_states"], build_recipe(cell).optimizer_of(replicas)):
        set_aside(checkpoint, "it is of another optimizer")
        return None
    return replicas, content["normexp"]["losses"]["num_steps"]


def read_checkpoint(checkpoint: Path) -> dict[str, Any] | None:
    """A checkpoint with all that a resume reads of it; None without one.

    One that is torn or foreign is set aside, and is none.
    """
    if not checkpoint.is_file():
        return None
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        lacking = (PARTS - set(content)) | (OWN_PARTS - set(content["normexp"]))
        if lacking:
            raise ValueError(f"it has no {min(lacking)}")
    except Exception as error:  # torch raises many kinds
        set_aside(checkpoint, one_line(error))
        return None
    return content


def set_aside(checkpoint: Path, reason: str) -> None:
    """Renames a checkpoint that cannot be used: to last.unreadable, or -2, -3 ... where taken."""
    suffixes = chain([".unreadable"], (f".unreadable-{number}" for number in count(2)))
    paths = (checkpoint.with_suffix(suffix) for suffix in suffixes)
    aside = next(path for path in paths if not path.exists())
    with suppress(FileNotFoundError):  # another process of this training was faster
        checkpoint.replace(aside)
        logger.warning(
            "%s cannot be used (%s); it is kept as %s and the stack starts over",
            *(checkpoint, reason, aside.name),
        )


def _fits(states: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> bool:
    """Whether a state is of these parameters and has their knobs; others may be what it counts."""
    fresh = optimizer.state_dict()["param_groups"]
    saved = [group for state in states for group in state.get("param_groups", [])]
    return len(saved) == len(fresh) and all(
        new["params"] == old.get("params") and new.keys() <= old.keys()
        for new, old in zip(fresh, saved, strict=True)
    )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}


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
