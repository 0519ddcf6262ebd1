"""Builds what trains a cell: replicas (new or from a checkpoint), module, callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from pytorch_lightning.callbacks import Callback
from torch import nn

from normexp.batching.replicas import InTurn, Replicas, Stacked
from normexp.batching.speed import stacks
from normexp.build import build_callbacks as build_own_callbacks
from normexp.build import build_optimizer, build_schedule, synchronized
from normexp.cells.cell import Cell
from normexp.cells.plan import num_devices_of
from normexp.config.spec import one_line
from normexp.data.batches import TrainingBatches
from normexp.training.callbacks import StepReports, TrainingProgress, act_on_batches
from normexp.training.devices import device_type, set_matmul_precision
from normexp.training.diagnostics import Diagnostics
from normexp.training.evaluation import criterion_of
from normexp.training.module import TrainingModule
from normexp.training.optim import Recipe
from normexp.training.recorder import Recorder

logger = logging.getLogger(__name__)

OnSteps = Callable[[int, int], None]  # called with (step, num_steps) from time to time


def build_module(
    cell: Cell,
    seeds: list[int],
    replicas: Replicas,
    recorder: Recorder,
    lrs: Sequence[float] | None = None,
) -> TrainingModule:
    """The module that trains and evaluates replicas of these seeds, at their own `lrs` if any."""
    size = cell.plan.sizes.batch_size
    batches = TrainingBatches(cell.data, seeds, size, drop_last=cell.cfg.drop_last)
    return TrainingModule(replicas, batches, build_recipe(cell, lrs), cell.evaluation, recorder)


def build_recipe(cell: Cell, lrs: Sequence[float] | None = None) -> Recipe:
    """The recipe of a cell; with `lrs`, for replicas with these learning rates."""
    cfg = cell.cfg
    return Recipe(
        sizes=cell.plan.sizes,
        optimizer=build_optimizer(cfg, momentum=cell.plan.optimizer_momentum),
        schedule=build_schedule(cfg, cell.plan.num_steps),
        lr=cell.plan.lr if lrs is None else max(lrs),
        lr_scales=None if lrs is None else tuple(lr / max(lrs) for lr in lrs),
        weight_decay=cfg.optim.weight_decay,
        decay_norm=cfg.optim.decay_norm,
        decay_bias=cfg.optim.get("decay_bias", True),
        max_grad_norm=cell.plan.max_grad_norm,
        eval_group=cell.plan.sizes.norm if cell.traits.mixes_samples_in_evaluation else None,
        log_every=cfg.log_every,
        max_chunk=1 if act_on_batches(_own_callbacks(cell)) else cfg.chunk,
        compile=cfg.get("compile", False),
        ema=cell.plan.ema,
    )


def build_callbacks(cell: Cell, on_steps: OnSteps | None) -> list[Callback]:
    """The callbacks of a training; without `on_steps`, a progress bar among them."""
    bar = TrainingProgress(cell.title, cell.plan.epochs)
    callbacks = [bar if on_steps is None else StepReports(on_steps), *_own_callbacks(cell)]
    if cell.cfg.diagnostics:
        callbacks.append(Diagnostics(cell.cfg.diagnostics, elementwise=not cell.traits.pools))
    return callbacks


def _own_callbacks(cell: Cell) -> list[Callback]:
    metrics = criterion_of(cell.data).metrics
    return build_own_callbacks(cell.cfg, [f"val/{name}" for name in metrics])


def build_replicas(cell: Cell, seeds: list[int], *, is_stacked: bool | None = None) -> Replicas:
    return arrange_replicas(cell, [cell.build(seed) for seed in seeds], is_stacked=is_stacked)


def arrange_replicas(
    cell: Cell, networks: list[nn.Module], *, is_stacked: bool | None = None
) -> Replicas:
    """Stacks networks of one cell if that is possible and faster, see `will_stack`."""
    device = device_type(cell.cfg.trainer.accelerator)
    set_matmul_precision(cell.plan.matmul_precision, device)
    if will_stack(cell, len(networks), is_stacked=is_stacked):
        return Stacked(networks)
    return InTurn(networks, has_foreign_draws=cell.traits.draws_for_itself)


def will_stack(cell: Cell, num_replicas: int, *, is_stacked: bool | None = None) -> bool:
    """True if this many replicas will be stacked; logs the reason if they cannot.

    The form in a checkpoint, `is_stacked`, decides where there is one.
    """
    wanted = cell.cfg.stack if is_stacked is None else is_stacked
    if wanted == "auto":
        device = device_type(cell.cfg.trainer.accelerator)
        wanted = stacks(device, num_replicas, cell.elements_per_forward)
    if not wanted or num_replicas == 1 or cell.alone is not None:
        return False
    obstacle = cell.traits.stacking_obstacle
    if num_devices_of(cell.cfg) > 1 and synchronized(cell.cfg):  # no communication under vmap
        obstacle = "the norm takes statistics over all devices"
    if obstacle is not None:
        logger.info("replicas run one after another: %s", obstacle)
    return obstacle is None


def scales_with_lr(cell: Cell) -> bool:
    """True if every step's rate is a share of `lr`, so that a stack may have several `lr`.

    A scheduler may set rates of its own, such as the `max_lr` of OneCycleLR.
    """
    return build_schedule(cell.cfg, cell.plan.num_steps).build is None


def resume_replicas(cell: Cell, seeds: list[int], checkpoint: Path) -> Replicas:
    """A new network per seed, in the form of a usable checkpoint, whose weights Lightning loads."""
    found = fitting_replicas(cell, seeds, checkpoint)
    if found is None:
        return build_replicas(cell, seeds)
    replicas, step = found
    logger.info("%s continues from step %d of %d", cell.title, step, cell.plan.num_steps)
    return replicas


def fitting_replicas(cell: Cell, seeds: list[int], checkpoint: Path) -> tuple[Replicas, int] | None:
    """New networks that a checkpoint fits, and its step; a torn or unfitting one is renamed."""
    if not checkpoint.is_file():
        return None
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        own = content["normexp"]
        replicas = build_replicas(cell, seeds, is_stacked=own["is_stacked"])
        trained = {k: v for k, v in content["state_dict"].items() if not k.startswith("averaged.")}
        if _shapes(trained) != _shapes(replicas.state_dict(prefix="replicas.")):
            raise ValueError("it belongs to other networks")
        optimizer = build_recipe(cell).build_optimizer(replicas)
        optimizer.load_state_dict(content["optimizer_states"][0])  # raises if it does not fit
        return replicas, own["losses"]["num_steps"]
    except Exception as error:  # torch raises many kinds
        with suppress(FileNotFoundError):  # another process of this training was faster
            aside = checkpoint.replace(checkpoint.with_suffix(".unreadable"))
            logger.warning(
                "%s cannot be used (%s); it is kept as %s and the stack starts over",
                *(checkpoint, one_line(error), aside.name),
            )
        return None


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items()}
