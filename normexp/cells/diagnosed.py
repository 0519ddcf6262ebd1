"""Diagnoses networks that a config builds: with weights from a file, or of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev

from torch import Tensor, nn

from normexp.batching.replicas import Batch, model_arguments
from normexp.build import keeping_data, load_data
from normexp.cells.cell import make_builder, make_recipe
from normexp.config.words import format_count
from normexp.config.cells import CellSpec
from normexp.data.batches import TrainingBatches
from normexp.data.dataset import Data
from normexp.diagnosis import TERMS, Diagnosis, decompose, diagnose
from normexp.diagnosis.network import num_batches_of
from normexp.errors import UserError
from normexp.training.evaluation import criterion_of
from normexp.training.recipe import Recipe
from normexp.training.statistics import shuffled


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
    """Diagnoses a network on the first training batches that `seed` draws."""
    steps = TrainingBatches(data, [seed], recipe.sizes.micro, drop_last=True)
    count = _count(recipe, len(data.train))
    dtype = next(network.parameters()).dtype
    batches = [steps.chunk(step, 1, dtype)[0] for step in range(count)]
    samples = [{name: value[0] for name, value in batch.items()} for batch in batches]
    return diagnose(network, _pairs(samples), _loss(data), max_batches=count)


def decompose_runs(
    networks: Sequence[nn.Module], data: Data, recipe: Recipe
) -> list[dict[str, float]]:
    """The terms of each network's test loss from training to evaluation mode.

    Over `num_samples` of the split in whole batches of the size of training, in a random order,
    without augmentation; see `normexp.diagnosis.decompose`.
    """
    size, dtype = recipe.sizes.micro, next(networks[0].parameters()).dtype
    parts = shuffled(data, "test").split(size)[: num_batches_of(size)]
    batches = [data.test.gather(indices) for indices in parts if len(indices) == size]
    for batch in batches:
        batch["inputs"] = data.model_inputs(batch["inputs"], dtype)
    if len(batches) < 2:
        return []
    count = {"num_samples": len(batches) * size}
    return [decompose(network, _pairs(batches), _loss(data)) | count for network in networks]


def decomposition_lines(rows: Sequence[Mapping[str, float]], num_test_samples: int) -> list[str]:
    """A table of the mean and standard deviation over seeds."""
    samples = f"{rows[0]['num_samples']:,} of {num_test_samples:,} test samples, whole batches"
    seeds = format_count(len(rows), "seed")
    lines = [f"test loss from training to evaluation mode, over {samples}: n = {seeds}"]
    modes = {"training": "training mode", "evaluation": "evaluation mode"}
    for name in ("training", *TERMS, "evaluation"):
        values = [row[name] for row in rows]
        if any(values) or name in modes:
            words, sign = (modes[name], "") if name in modes else (TERMS[name].words, "+")
            spread = f" ({stdev(values):.4f})" if len(rows) > 1 else ""
            lines.append(f"  {words:<50}{mean(values):{sign}.4f}{spread}")
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


def _pairs(batches: Sequence[Batch]) -> list[tuple[tuple[Tensor, ...], Batch]]:
    return [(model_arguments(batch), batch) for batch in batches]


def _loss(data: Data) -> Callable[[Tensor, Batch], Tensor]:
    criterion = criterion_of(data)
    return lambda output, batch: criterion.loss(output, batch) / batch["targets"].numel()
