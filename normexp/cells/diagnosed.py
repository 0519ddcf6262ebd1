"""Diagnoses networks that a config builds: with weights from a file, or of a finished run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, model_arguments
from normexp.build import keeping_data, load_data
from normexp.cells.cell import make_builder, make_recipe
from normexp.config.rules import format_count
from normexp.config.spec import CellSpec
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data
from normexp.diagnosis import SHORT, Diagnosis, cancelling, decompose, diagnose
from normexp.diagnosis.network import num_batches_of
from normexp.errors import UserError
from normexp.training.evaluation import criterion_of
from normexp.training.recipe import Recipe
from normexp.training.statistics import shuffled

logger = logging.getLogger(__name__)


@keeping_data()
def diagnose_weights(spec: CellSpec) -> Diagnosis:
    """Why a network with weights from a file evaluates worse than it trains.

    The network keeps the norms that it is built with, unless the command names a norm. How its
    training images were augmented is not known: they are not, unless the command says how.

    Raises:
        UserError: no weights, weights that do not fit, or a part that cannot be built.
    """
    values = spec.values
    if values["model"].get("weights") is None:
        raise UserError(
            "model.weights is missing: name the file of the weights to diagnose, as in "
            "model=torchvision model.name=resnet18 model.weights=FILE data=..., or a finished "
            "cell, run=runs/STUDY/CELL"
        )
    data = load_data(spec)
    if not any(word.lstrip("+").startswith("data.augmentation") for word in spec.overrides):
        data = replace(data, augmentation=None)
    recipe = make_recipe(spec, data)
    build = make_builder(spec, recipe, data)
    keys = {word.partition("=")[0].partition(".")[0] for word in spec.overrides}
    if not build.takes_norm and "norm" not in keys:
        build = replace(build, norm=None)
    return _diagnose_network(build(values["seed"]), data, recipe, seed=values["seed"])


def _diagnose_network(network: nn.Module, data: Data, recipe: Recipe, *, seed: int) -> Diagnosis:
    """Diagnoses a network on training batches of its recipe, and on the test split.

    Args:
        seed: draws the order and augmentation of the batches, those of the first epoch.
    """
    logger.info("batches of the training split; evaluation batches of the test split")
    steps = TrainingBatches(data, [seed], recipe.sizes.micro, drop_last=True)
    count = _count(recipe, len(data.train))
    dtype = next(network.parameters()).dtype
    batches = [steps.chunk(step, 1, dtype)[0] for step in range(count)]
    others = _of_split(data, recipe, "test", dtype)
    return diagnose(
        network,
        _pairs([{name: value[0] for name, value in batch.items()} for batch in batches]),
        _loss(data),
        evaluation_batches=_pairs(others) if len(others) > 1 else None,
        max_batches=count,
    )


def decompose_runs(
    networks: Sequence[nn.Module], data: Data, recipe: Recipe
) -> list[dict[str, float]]:
    """What carries the test loss of each network from training to evaluation mode.

    Over `num_samples` of the split in whole batches of the size of training; see
    `normexp.diagnosis.decompose`.
    """
    batches = _of_split(data, recipe, "test", next(networks[0].parameters()).dtype)
    if len(batches) < 2:
        return []
    count = {"num_samples": len(batches) * recipe.sizes.micro}
    return [decompose(network, _pairs(batches), _loss(data)) | count for network in networks]


def decomposition_lines(rows: Sequence[Mapping[str, float]], num_test_samples: int) -> list[str]:
    """A table of the mean and standard deviation over seeds, and the cause that carries most."""
    names = {"training": "training mode", **SHORT, "evaluation": "evaluation mode"}
    columns = {name: [row[name] for row in rows] for name in names}
    shown = [n for n in names if any(columns[n]) or n in ("training", "evaluation")]
    samples = f"{rows[0]['num_samples']:,} of {num_test_samples:,} test samples, whole batches"
    seeds = format_count(len(rows), "seed")
    lines = [f"test loss from training to evaluation mode, over {samples}: n = {seeds}"]
    for name in shown:
        sign = "" if name in ("training", "evaluation") else "+"
        spread = f" ({stdev(columns[name]):.4f})" if len(rows) > 1 else ""
        lines.append(f"  {names[name]:<32}{mean(columns[name]):{sign}.4f}{spread}")
    costs = {name: mean(columns[name]) for name in SHORT if name in shown}
    if words := cancelling([*costs.values()]):
        lines.append(words)
    cause = max(costs, key=lambda name: costs[name], default=None)
    gap = mean(columns["evaluation"]) - mean(columns["training"])
    if gap <= 0:
        lines.append("evaluation mode costs no more than training mode")
    elif cause is not None:
        lines.append(f"most of what evaluation mode costs: {SHORT[cause]}")
    return lines


def _count(recipe: Recipe, num_samples: int) -> int:
    """The batches that a diagnosis reads."""
    size = recipe.sizes.micro
    count = min(num_batches_of(size), num_samples // size)
    if count < 2:
        raise UserError(
            f"batch_size={size}: the training split has {num_samples} samples, and a diagnosis "
            "needs two batches or more; set a smaller batch_size"
        )
    return count


def _of_split(data: Data, recipe: Recipe, split: str, dtype: torch.dtype) -> list[Batch]:
    """Batches of a split in a random order, without augmentation."""
    size = recipe.sizes.micro
    order = shuffled(data, split)
    parts = order.split(size)[: num_batches_of(size)]
    batches = [getattr(data, split).gather(indices) for indices in parts]
    for batch in batches:
        batch["inputs"] = data.model_inputs(batch["inputs"], dtype)
    return [batch for batch in batches if len(batch["inputs"]) == size]


def _pairs(batches: Sequence[Batch]) -> list[tuple[tuple[Tensor, ...], Batch]]:
    return [(model_arguments(batch), batch) for batch in batches]


def _loss(data: Data) -> Callable[[Tensor, Batch], Tensor]:
    criterion = criterion_of(data)
    return lambda output, batch: criterion.loss(output, batch) / batch["targets"].numel()
