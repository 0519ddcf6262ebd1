"""Evaluates a finished cell again, from its saved weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from normexp.cells.assembly import arrange_replicas, build_module
from normexp.cells.cell import Cell, prepare_cell
from normexp.cells.load import load_config, load_weights
from normexp.cells.naming import choices_in
from normexp.cells.plan import place_on_one_device
from normexp.cells.recorded import has_evaluations
from normexp.config.rules import OPTIONS
from normexp.config.target import plain
from normexp.errors import UserError
from normexp.records.files import read_json, refusing_denied, write_evaluation
from normexp.records.paths import (
    EVALUATION_FILE,
    RESULT_FILE,
    WEIGHTS_FILE,
    find_cell,
    list_seeds,
    seed_dir,
)
from normexp.records.result import Result, read_records, read_run
from normexp.records.samples import read_samples, write_samples
from normexp.reporting.evaluations import print_evaluations
from normexp.training.evaluation import EvaluationPlan
from normexp.training.fit import evaluate
from normexp.training.recorder import Recorder

logger = logging.getLogger(__name__)

Contents = dict[int, dict[str, Any]]  # the content of evaluation.json by seed
Samples = dict[int, dict[str, np.ndarray]]  # the content of samples.npz by seed


def evaluate_run(cell_dir: Path, asked: Mapping[str, Any]) -> None:
    """Evaluates every finished run of a cell, adds to its evaluation.json, and prints a table.

    Args:
        asked: evaluate_with and related keys; they replace the values of the training.

    Raises:
        UserError: no finished cell, changed code or data, or an evaluation that is not possible.
    """
    find_cell(cell_dir)
    results = finished_results(cell_dir)
    names = choices_in(results[0].config)
    cfg = DictConfig(OmegaConf.merge(load_config(cell_dir, names), asked))
    place_on_one_device(cfg)  # evaluation does not need the devices of the training
    if not torch.cuda.is_available():
        cfg.trainer.accelerator = "cpu"
    cell = prepare_cell(cfg, names)
    if cell.id != results[0].cell_id:
        raise UserError(
            f"{cell_dir}: its norm, model or data has changed since it was trained, and the same "
            f"config now means {cell.id}; train that cell"
        )
    seeds, precision = [result.seed for result in results], cfg.trainer.precision
    networks = [cell.build(seed) for seed in seeds]
    for seed, network in zip(seeds, networks, strict=True):
        load_weights(network, seed_dir(cell_dir, seed), precision=precision)
    module = build_module(cell, seeds, arrange_replicas(cell, networks), Recorder([]))
    evaluate(module, accelerator=cfg.trainer.accelerator, precision=precision)
    evaluator, metrics = module.evaluator, module.metrics
    contents = {seed: evaluator.content(metrics, index) for index, seed in enumerate(seeds)}
    samples = {seed: evaluator.samples_of(metrics, index) for index, seed in enumerate(seeds)}
    why = why_nothing(cell.evaluation)
    print_evaluations(contents, cell.title, why_nothing=why, invalid=cell.invalid)
    save_evaluations(cell_dir, contents, samples)


def finished_results(cell_dir: Path) -> list[Result]:
    """The results of the runs that can be evaluated: finished, with weights."""
    folders = [seed_dir(cell_dir, seed) for seed in list_seeds(cell_dir)]
    ended = [folder for folder in folders if (folder / RESULT_FILE).is_file()]
    results = [read_run(folder) for folder in ended if (folder / WEIGHTS_FILE).is_file()]
    finished = [result for result in results if result.status == "finished"]
    if not finished:
        why = "kept its weights (save_weights=true)" if ended else "has ended: train it first"
        raise UserError(f"{cell_dir} has no finished run: none of its seeds {why}")
    if len(finished) < len(folders):
        logger.info(
            "skipping %d of %d runs: not finished, or without weights",
            *(len(folders) - len(finished), len(folders)),
        )
    return finished


def save_evaluations(cell_dir: Path, contents: Contents, samples: Samples) -> None:
    """Adds to evaluation.json and samples.npz of each run."""
    for seed, content in contents.items():
        path = seed_dir(cell_dir, seed) / EVALUATION_FILE
        with refusing_denied(path, "the numbers are printed, but not saved"):
            write_samples(path.parent, read_samples(path.parent) | samples[seed])
            before = read_json(path) if path.exists() else {}
            content["asked"] = before.get("asked", {}) | content["asked"]
            write_evaluation(path.parent, before | content)


def suggest_evaluation(cell: Cell, seeds: Sequence[int]) -> None:
    """Logs the command that adds the requested evaluations that recorded runs lack."""
    runs = read_records(cell.directory, seeds).ended
    if has_evaluations(cell.directory, runs, cell.evaluation.kinds):
        return
    if not any((seed_dir(cell.directory, seed) / WEIGHTS_FILE).is_file() for seed in seeds):
        logger.info("recorded without these statistics, and without weights to measure them from")
        return
    words = [f"run={cell.directory}", f"evaluate_with=[{','.join(cell.evaluation.statistics)}]"]
    for key in ("precise_samples", "evaluate_batch_sizes"):
        value = plain(cell.cfg)[key]
        if value != OPTIONS["evaluate"][key].default:
            words.append(f"{key}={value}".replace(" ", ""))
    logger.info(
        "recorded without these statistics; to add them: python -m normexp.evaluate %s",
        join(words),
    )


def why_nothing(plan: EvaluationPlan) -> str:
    """Says why the statistics that were asked for gave no number."""
    lacks = {"batch": "does not mix samples", "precise": "keeps no running moments"}
    reason = "the norm " + " and ".join(lacks[kind] for kind in lacks if kind in plan.statistics)
    if plan.batch_sizes:  # batch statistics were evaluated
        reason = "none of the numbers is finite"
    asked = f"evaluate_with=[{','.join(plan.statistics)}]"
    return f"nothing to evaluate with {asked}: {reason}; try evaluate_with=[running]"
