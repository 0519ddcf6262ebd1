"""The objects of a training, put together from a cell: networks, task, callbacks."""

from __future__ import annotations

import logging

import torch
from pytorch_lightning.callbacks import Callback
from torch import nn

from normexp.batching.draws import derive_seed
from normexp.batching.replicas import InTurn, Replicas, Stacked
from normexp.batching.stacking import stacks
from normexp.build import build_optimizer
from normexp.data.batches import TrainingBatches
from normexp.studies.cell import Cell
from normexp.tasks.classification import Classification
from normexp.tasks.diagnostics import Diagnostics
from normexp.tasks.language_modeling import LanguageModeling
from normexp.tasks.optimizer import Schedule
from normexp.tasks.progress import TrainingProgress
from normexp.tasks.recorder import Recorder
from normexp.tasks.training import Recipe, TrainingTask

logger = logging.getLogger(__name__)

# Optimizers of torch that update each value from its own history alone.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")

TASKS = {"classification": Classification, "language_modeling": LanguageModeling}


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
    wanted = cell.cfg.stack if is_stacked is None else is_stacked
    if wanted == "auto":
        device_type = _device_type(cell.cfg.trainer.accelerator)
        wanted = stacks(device_type, len(seeds), cell.elements_per_forward)
    if wanted and len(seeds) > 1:
        obstacle = cell.traits.stacking_obstacle or _obstacle_of_optimizer(cell)
        if obstacle is None:
            return Stacked(networks)
        logger.info("replicas run one after another: %s", obstacle)
    in_turn = InTurn(networks)
    if cell.traits.draws_for_itself:
        in_turn.foreign_seeds = [derive_seed(seed, "foreign") for seed in seeds]
    return in_turn


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
    )


def _device_type(accelerator: str) -> str:
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if accelerator == "gpu" else accelerator
