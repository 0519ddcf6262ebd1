"""What trains a cell: its module, its seeds as replicas, and the loggers of its runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.loggers import Logger
from torch import nn

from normexp.errors import UserError
from normexp.training.batching.replicas import SMALL_FORWARD, InTurn, Replicas, Stacked
from normexp.training.cells.cell import Cell
from normexp.training.config.spec import CellSpec
from normexp.training.config.target import read_target
from normexp.training.data.batches import TrainingBatches
from normexp.training.devices import device_type
from normexp.training.module import Recorder, TrainingModule
from normexp.training.records.layout import METRICS_FILE, seed_dir
from normexp.training.records.metrics import read_metrics
from normexp.training.records.result import Result, read_result, settings_of
from normexp.training.trackers import Trackers

logger = logging.getLogger(__name__)

Form = Literal["stacked", "in turn", "apart"]


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
    batches = TrainingBatches(cell.data, seeds, size, drop_last=recipe.settings.drop_last)
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


def arrange_replicas(
    cell: Cell, networks: list[nn.Module], *, is_stacked: bool | None = None
) -> Replicas:
    """Stacks networks of one cell, or takes them one after another, see `form_of`."""
    if form_of(cell, len(networks), is_stacked=is_stacked) == "stacked":
        return Stacked(networks)
    return InTurn(networks, has_foreign_draws=cell.traits.draws_for_itself)


def form_of(
    cell: Cell, num_runs: int, num_rates: int = 1, *, is_stacked: bool | None = None
) -> Form:
    """How the runs of a stack train; logs the reason if they cannot be stacked.

    stacked    at once, under vmap, if that is possible and faster
    in turn    one after another in one process
    apart      each as a stack of its own: on a CPU it can then have a core of its own, and it ends
               with the same numbers as in turn

    Args:
        num_rates: of learning rates; at every step those must be proportional to `lr`.
        is_stacked: what a checkpoint says, which overrides the recipe.
    """
    if num_runs == 1:
        return "in turn"
    settings, obstacle = cell.recipe.settings, cell.traits.stacking_obstacle
    on_gpu = device_type(settings.trainer.accelerator) != "cpu"
    wanted = settings.stack if is_stacked is None else is_stacked
    if wanted == "auto":
        wanted = on_gpu or cell.elements_per_forward <= SMALL_FORWARD
    if settings.trainer.num_processes > 1 and cell.recipe.is_synchronized:
        # Under vmap nothing can be sent.
        obstacle = "the norm takes statistics over all devices"
    rates_fit = num_rates == 1 or cell.recipe.schedule.follows_lr
    if wanted and cell.alone is None:
        if obstacle is None and rates_fit:
            return "stacked"
        if obstacle is not None:
            logger.info("%s: seeds train one after another: %s", cell.title, obstacle)
    return "in turn" if on_gpu and num_rates == 1 and cell.alone is None else "apart"


# --- Loggers besides metrics.csv ------------------------------------------------------------------


@contextmanager
def run_loggers(
    spec: CellSpec,
    seed: int,
    facts: Cell | Result,
    build: Callable[[Mapping[str, Any]], list[Logger]],
) -> Iterator[list[Logger]]:
    """The loggers of one run; finishes them at the end, as failed if the block raises.

    Args:
        facts: what defines the run.
        build: makes the loggers from names and folders of the run.
    """
    settings, study_dir, version = spec.settings, spec.study_dir, f"seed-{seed}"
    names = {"study": settings.study, "experiment": settings.experiment}
    params = settings_of(facts.defines, facts.derived) | names
    labels = [params[key] for key in ("norm", "model", "data", "study", "experiment")]
    labels += [*(settings.tags or []), facts.measured.invalid and "INVALID"]
    loggers = build(
        {
            "save_dir": str(study_dir),
            "run_dir": str(seed_dir(spec.directory, seed)),
            "name": spec.id,
            "version": version,
            "experiment_name": study_dir.name,
            "run_name": f"{spec.id}/{version}",
            "labels": list(dict.fromkeys(str(label) for label in labels if label)),
            "notes": settings.notes,
        }
    )
    status = "failed"
    try:
        for each in loggers:
            each.log_hyperparams({**params, "cell": spec.id, "seed": seed})
        yield loggers
        status = "success"
    finally:
        for each in loggers:
            each.finalize(status)


def log_record(spec: CellSpec, seed: int, name: str) -> None:
    """Gives the history of an ended run to a new logger of the config, as its training would."""
    run_dir = seed_dir(spec.directory, seed)
    LightningEnvironment().set_global_rank(0)  # as in a training
    target = read_target(spec.settings.logger[name], f"logger.{name}")
    build = partial(Trackers().loggers, [target])
    with run_loggers(spec, seed, read_result(run_dir), build) as loggers:
        recorder = Recorder([None], [loggers])
        rows = read_metrics(run_dir / METRICS_FILE)
        for position, at_once in groupby(rows, key=itemgetter(slice(3))):
            recorder.record(position, {row.name: [row.value] for row in at_once})
