"""The objects of a training, put together from a cell: networks, task, callbacks."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from pytorch_lightning.callbacks import Callback
from torch import nn

from normexp.batching.draws import derive_seed
from normexp.batching.replicas import InTurn, Replicas, Stacked
from normexp.batching.stacking import stacks
from normexp.build import build_optimizer, synchronized
from normexp.data.batches import TrainingBatches
from normexp.reporting.metric import describe_metric
from normexp.studies.cell import Cell
from normexp.tasks.classification import Classification
from normexp.tasks.compilation import set_matmul_precision
from normexp.tasks.diagnostics import Diagnostics
from normexp.tasks.language_modeling import LanguageModeling
from normexp.tasks.optimizer import Schedule
from normexp.tasks.progress import StepReports, TrainingProgress
from normexp.tasks.pruning import Pruner
from normexp.tasks.recorder import Recorder
from normexp.tasks.strategy import device_type
from normexp.tasks.training import Recipe, TrainingTask

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
