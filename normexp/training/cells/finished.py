"""Loads finished runs from their saved weights, and evaluates them again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normexp.any_network.diagnosis import TERMS, decompose
from normexp.any_network.diagnosis.batches import num_batches_of
from normexp.errors import UserError, one_line
from normexp.norms.site import load_as_built
from normexp.training.batching.replicas import Batch, Replicas, model_arguments
from normexp.training.cells.cell import Cell, make_builder, prepare_cell
from normexp.training.cells.module import arrange_replicas, build_module
from normexp.training.config.compose import refuse_missing_values
from normexp.training.config.groups import shipped_defaults
from normexp.training.config.keys import with_values
from normexp.training.config.recorded import recorded_spec
from normexp.training.data.dataset import attach_prediction, without_samples
from normexp.training.fit import evaluate
from normexp.training.module import Recorder
from normexp.training.recipe import recipe_of
from normexp.training.records.files import ensure_writable, read_json, write_json
from normexp.training.records.layout import (
    EVALUATION_FILE,
    RESULT_FILE,
    WEIGHTS_FILE,
    find_cell,
    find_run,
    list_seeds,
    seed_dir,
)
from normexp.training.records.result import Result, read_result
from normexp.training.records.samples import read_samples, write_samples
from normexp.training.samples import shuffled
from normexp.training.studies.terminal import print_evaluations
from normexp.words import format_count

logger = logging.getLogger(__name__)

Contents = dict[int, dict[str, Any]]  # the content of evaluation.json by seed
Samples = dict[int, dict[str, np.ndarray]]  # the content of samples.npz by seed

# Values of a config for loading a network: none of what trained it need exist any more.
WITHOUT_TRAINING: dict[str, Any] = {
    "model.weights": None,  # the run's own weights replace those it started from
    "optim": shipped_defaults("optim", "sgd"),
    "schedule": shipped_defaults("schedule", "cosine"),
    "callback": None,
    "logger": {},
    "lr_rule": "none",
}


def load_run(run_dir: Path) -> nn.Module:
    """The trained network of a run, in evaluation mode on the CPU.

    Rebuilds it from the cell's config.yaml and the shapes in result.json, without the data set.

    Args:
        run_dir: `runs/<study>/<cell_id>/seed-<k>`, or the folder of a cell with a single seed.

    Raises:
        UserError: no such run, a folder of several seeds, no weights, or weights that do not fit.
    """
    cell_dir, seed = find_run(run_dir)
    result = read_result(seed_dir(cell_dir, seed))
    spec = recorded_spec(cell_dir, result, WITHOUT_TRAINING)
    data = without_samples(result.measured.data_set)
    recipe = recipe_of(spec, data)
    network = make_builder(spec, recipe, data)(seed)
    file = seed_dir(cell_dir, seed) / WEIGHTS_FILE
    load_weights(network, file, precision=recipe.settings.trainer.precision)
    attach_prediction(network, data)
    return network.eval()


def load_weights(network: nn.Module, path: Path, *, precision: str) -> None:
    """Loads the weights of a run into its network, in the precision of the training."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: the run has not ended, or was trained with save_weights=false"
        )
    if precision == "64-true":
        network.double()
    try:
        load_as_built(network, torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds for a torn or foreign file
        raise UserError(
            f"{path} does not fit its config.yaml, or is torn ({one_line(error)}); train the "
            "run again"
        ) from error


# --- Evaluating again ----------------------------------------------------------------------------


def evaluate_run(cell_dir: Path, options: Mapping[str, Any]) -> None:
    """Evaluates every finished run of a cell, adds to its evaluation.json, and prints a table.

    Args:
        options: evaluate_with and related keys, in place of the training's values.

    Raises:
        UserError: no finished cell, changed code or data, or an evaluation that is not possible.
    """
    find_cell(cell_dir)
    ensure_writable(cell_dir, "run")
    results = finished_results(cell_dir)
    spec = recorded_spec(cell_dir, results[0], options)
    refuse_missing_values(spec.config)
    if results[0].cell_id != spec.id:
        raise UserError(
            f"{cell_dir}: its norm, model or data has changed since it was trained, and the same "
            f"config now means {spec.id}; train that cell"
        )
    # Evaluation does not need the devices of the training.
    changes = {"trainer.devices": 1, "trainer.num_nodes": 1, "trainer.strategy": "auto"}
    micro, norm = (results[0].derived[key] for key in ("micro_batch_size", "norm_batch_size"))
    changes |= {"norm_batch_size": None if norm == micro else norm}
    if not torch.cuda.is_available():
        changes["trainer.accelerator"] = "cpu"
    cell = prepare_cell(replace(spec, config=with_values(spec.config, changes)))
    seeds = [result.seed for result in results]
    replicas = _load_replicas(cell, cell_dir, seeds)
    module = build_module(cell, seeds, replicas, Recorder([]))
    evaluate(module, cell_dir)
    evaluator, metrics = module.evaluator, module.metrics
    contents = {seed: evaluator.content(metrics, index) for index, seed in enumerate(seeds)}
    samples = {seed: evaluator.samples_of(metrics, index) for index, seed in enumerate(seeds)}
    asked = f"evaluate_with=[{','.join(cell.recipe.statistics)}]"
    why = (
        f"nothing to evaluate with {asked}: the norm does not mix samples, keeps no running "
        "moments or gave no finite number; try evaluate_with=[running]"
    )
    print_evaluations(contents, cell.title, why_nothing=why, invalid=cell.invalid)
    if cell.traits.mixes_samples and (rows := _decompose(cell, replicas)):
        print("\n".join(decomposition_lines(rows, len(cell.data.test))))
        for seed, row in zip(seeds, rows, strict=True):
            contents[seed]["decomposition"] = row
    save_evaluations(cell_dir, contents, samples)


def _decompose(cell: Cell, replicas: Replicas) -> list[dict[str, float]]:
    """The terms of each run's test loss from training to evaluation mode; see `decompose`.

    Over `num_samples` of the split in whole batches of the size of training, in a random order,
    without augmentation; none for a norm that fails on these batches.
    """
    data, size = cell.data, cell.recipe.sizes.micro
    parts = shuffled(data, "test").split(size)[: num_batches_of(size)]
    parts = [part for part in parts if len(part) == size]
    dtype, pairs = next(replicas.parameters()).dtype, []
    for batch in map(data.test.gather, parts):
        batch["inputs"] = data.model_inputs(batch["inputs"], dtype)
        pairs.append((model_arguments(batch), batch))

    def loss(output: Tensor, batch: Batch) -> Tensor:
        criterion, targets = cell.recipe.criterion, batch["targets"]
        return criterion.loss(output, batch) / max(1, int(criterion.num_targets(targets[None])))

    count, networks = {"num_samples": len(parts) * size}, range(replicas.num_replicas)
    try:
        return [decompose(replicas.replica(i), pairs, loss) | count for i in networks]
    except UserError as error:
        logger.info("the test loss is not decomposed: %s", error)
        return []


def decomposition_lines(rows: Sequence[Mapping[str, float]], num_test_samples: int) -> list[str]:
    """A table of the mean and standard deviation over seeds."""
    samples = f"{rows[0]['num_samples']:,} of {num_test_samples:,} test samples, whole batches"
    seeds = format_count(len(rows), "seed")
    lines = [f"test loss from training to evaluation mode, over {samples}: n = {seeds}"]
    modes = {"training": "training mode", "evaluation": "evaluation mode"}
    for name in ("training", *TERMS, "evaluation"):
        values = [row[name] for row in rows]
        if any(values) or name in modes:
            words, sign = (modes[name], "") if name in modes else (TERMS[name], "+")
            spread = f" ({stdev(values):.4f})" if len(rows) > 1 else ""
            lines.append(f"  {words:<50}{mean(values):{sign}.4f}{spread}")
    return lines


def _load_replicas(cell: Cell, cell_dir: Path, seeds: Sequence[int]) -> Replicas:
    networks = [cell.build(seed) for seed in seeds]
    for seed, network in zip(seeds, networks, strict=True):
        path = seed_dir(cell_dir, seed) / WEIGHTS_FILE
        load_weights(network, path, precision=cell.recipe.settings.trainer.precision)
    return arrange_replicas(cell, networks)


def finished_results(cell_dir: Path) -> list[Result]:
    """The results of the runs that can be evaluated: finished, with weights."""
    folders = [seed_dir(cell_dir, seed) for seed in list_seeds(cell_dir)]
    ended = [path for path in folders if (path / RESULT_FILE).is_file()]
    results = [read_result(path) for path in ended]
    finished = [result for result in results if result.status == "finished"]
    with_weights, without = [], []
    for result in finished:
        has_weights = (seed_dir(cell_dir, result.seed) / WEIGHTS_FILE).is_file()
        (with_weights if has_weights else without).append(result)
    if not with_weights:
        raise UserError(f"{cell_dir} has no finished run with weights (save_weights=true)")
    if without:
        seeds = ", ".join(str(result.seed) for result in without)
        logger.warning("not evaluated: seed %s, which has no %s", seeds, WEIGHTS_FILE)
    return with_weights


def save_evaluations(cell_dir: Path, contents: Contents, samples: Samples) -> None:
    """Adds to the evaluation.json and samples.npz of each run."""
    for seed, content in contents.items():
        path = seed_dir(cell_dir, seed) / EVALUATION_FILE
        write_samples(path.parent, read_samples(path.parent) | samples[seed])
        before = read_json(path) if path.exists() else {}
        write_json(path, before | content)
