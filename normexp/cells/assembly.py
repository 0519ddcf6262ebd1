"""Builds what trains a cell: replicas (new or from a checkpoint), module, callbacks and loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from pytorch_lightning.loggers import Logger
from torch import nn

from normexp.batching.replicas import InTurn, Replicas, Stacked
from normexp.batching.speed import stacking_pays
from normexp.cells.cell import Cell
from normexp.data.batches import TrainingBatches
from normexp.errors import UserError
from normexp.records.paths import seed_dir
from normexp.records.result import hyperparameters
from normexp.training.module import TrainingModule
from normexp.training.recorder import Recorder

logger = logging.getLogger(__name__)


def build_module(
    cell: Cell,
    seeds: list[int],
    replicas: Replicas,
    recorder: Recorder,
    lrs: Sequence[float] | None = None,
) -> TrainingModule:
    """The module that trains and evaluates replicas; `seeds` and `lrs` have one value for each."""
    recipe = cell.recipe
    size = recipe.sizes.batch_size
    batches = TrainingBatches(cell.data, seeds, size, drop_last=recipe.drop_last)
    if lrs is not None:
        scales = tuple(lr / max(lrs) for lr in lrs)
        recipe = replace(recipe, lr=max(lrs), lr_scales=scales)
    return TrainingModule(replicas, batches, recipe, recorder)


def module_of(cell: Cell) -> TrainingModule:
    """The module of a cell's seeds for a Trainer of the user's own, whose batches are its steps."""
    seeds = cell.spec.seeds
    if len(seeds) > 1 and cell.alone is not None:
        raise UserError(f"replicas={len(seeds)}: {cell.alone}; set replicas=1")
    cell = replace(cell, recipe=replace(cell.recipe, max_chunk=1))
    replicas = arrange_replicas(cell, [cell.build(seed) for seed in seeds])
    module = build_module(cell, seeds, replicas, Recorder([]))
    module.configure_callbacks = cell.recipe.callbacks
    return module


# --- Replicas ------------------------------------------------------------------------------------


def arrange_replicas(
    cell: Cell, networks: list[nn.Module], *, is_stacked: bool | None = None
) -> Replicas:
    """Stacks networks of one cell if that is possible and faster, see `will_stack`."""
    if will_stack(cell, len(networks), is_stacked=is_stacked):
        return Stacked(networks)
    return InTurn(networks, has_foreign_draws=cell.traits.draws_for_itself)


def will_stack(cell: Cell, num_replicas: int, *, is_stacked: bool | None = None) -> bool:
    """True if this many replicas will be stacked; logs the reason if they cannot.

    `is_stacked`, the form in a checkpoint, overrides the recipe.
    """
    devices = cell.recipe.devices
    wanted = cell.recipe.stack if is_stacked is None else is_stacked
    if wanted is None:
        wanted = stacking_pays(devices.type, num_replicas, cell.elements_per_forward)
    if not wanted or num_replicas == 1 or cell.alone is not None:
        return False
    obstacle = cell.traits.stacking_obstacle
    if devices.count > 1 and devices.shares_statistics:  # no communication under vmap
        obstacle = "the norm takes statistics over all devices"
    if obstacle is not None:
        logger.info("%s: replicas run one after another: %s", cell.title, obstacle)
    return obstacle is None


def can_stack_rates(cell: Cell, num_replicas: int) -> bool:
    """True if runs that differ from a cell in `lr` alone may share its stack.

    At every step the rate must be proportional to `lr`.
    """
    return cell.recipe.schedule.follows_lr and will_stack(cell, num_replicas)


def resume_replicas(cell: Cell, seeds: list[int], checkpoint: Path) -> Replicas:
    """New networks, stacked as those in the checkpoint, which Lightning loads into them."""
    networks = [cell.build(seed) for seed in seeds]
    if not checkpoint.is_file():
        return arrange_replicas(cell, networks)
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["normexp"]
    step = state["step"]
    logger.info("%s continues from step %d of %d", cell.title, step, cell.recipe.num_steps)
    return arrange_replicas(cell, networks, is_stacked=state["is_stacked"])


# --- Loggers besides metrics.csv ------------------------------------------------------------------


@contextmanager
def run_loggers(cell: Cell, seed: int) -> Iterator[list[Logger]]:
    """The loggers of one run; finishes them at the end, as failed if the block raises."""
    config, folder, version = cell.spec.values, seed_dir(cell.directory, seed), f"seed-{seed}"
    params = hyperparameters(
        cell.description, study=config["study"], experiment=config.get("experiment")
    )
    labels = [params[key] for key in ("norm", "model", "data", "study", "experiment")]
    labels += [*(config["tags"] or []), cell.invalid and "INVALID"]
    loggers = cell.recipe.loggers(
        {
            "save_dir": str(cell.directory.parent),
            "run_dir": str(folder),
            "name": cell.spec.id,
            "version": version,
            "experiment_name": cell.directory.parent.name,
            "run_name": f"{cell.spec.id}/{version}",
            "labels": list(dict.fromkeys(str(label) for label in labels if label)),
            "notes": config["notes"],
        }
    )
    status = "failed"
    try:
        for each in loggers:
            each.log_hyperparams({**params, "seed": seed})
        yield loggers
        status = "success"
    finally:
        for each in loggers:
            each.finalize(status)
