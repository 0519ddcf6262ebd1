"""Evaluating a finished cell again, from the weights it kept."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.cells.cell import Cell, prepare_cell
from normexp.cells.load import find_cell, load_config, load_weights
from normexp.cells.naming import GROUPS
from normexp.cells.plan import place_on_one_device
from normexp.cells.stack import arrange_replicas, build_task
from normexp.errors import UserError
from normexp.records.files import refusing_denied, write_evaluation
from normexp.records.paths import (
    EVALUATION_FILE,
    RESULT_FILE,
    WEIGHTS_FILE,
    list_seeds,
    seed_dir,
)
from normexp.records.result import Result, read_json, read_run
from normexp.training.evaluation import EvaluationPlan, StatisticsEvaluation, evaluate
from normexp.training.recorder import Recorder

logger = logging.getLogger(__name__)

Contents = dict[int, dict[str, Any]]  # evaluation.json by seed


def evaluate_run(cell_dir: Path, asked: Mapping[str, Any]) -> None:
    """Evaluates every finished run of a cell as `asked`, adds to its evaluation.json, and shows it.

    Args:
        asked: evaluate_with and its companions, in the place of what the training had.

    Raises:
        UserError: no finished cell, changed code or data, or evaluations that it cannot answer.
    """
    find_cell(cell_dir)
    results = finished_results(cell_dir)
    choices = {group: results[0].config[group] for group in GROUPS}
    cfg = DictConfig(OmegaConf.merge(load_config(cell_dir), asked))
    place_on_one_device(cfg)  # wherever it was trained
    if not torch.cuda.is_available():
        cfg.trainer.accelerator = "cpu"
    cell = prepare_cell(cfg, choices)
    if cell.id != results[0].cell_id:
        raise UserError(
            f"{cell_dir}: its norm, model or data has changed since it was trained, the same "
            f"config is now {cell.id}; train it again"
        )
    contents = _evaluate(cell, cell_dir, [result.seed for result in results])
    print_evaluations(cell, contents)
    save_evaluations(cell_dir, contents)


def finished_results(cell_dir: Path) -> list[Result]:
    """The results of the runs that can be evaluated: finished, with weights."""
    folders = [seed_dir(cell_dir, seed) for seed in list_seeds(cell_dir)]
    ended = [folder for folder in folders if (folder / RESULT_FILE).is_file()]
    results = [read_run(folder) for folder in ended if (folder / WEIGHTS_FILE).is_file()]
    finished = [result for result in results if result.status == "finished"]
    if not finished:
        why = "kept its weights (save_weights=true)" if ended else "has ended: train it first"
        raise UserError(f"{cell_dir} is no finished run: none of its seeds {why}")
    if len(finished) < len(folders):
        left_out = len(folders) - len(finished)
        logger.info(
            "%d of %d runs are left out: not finished, or no weights", left_out, len(folders)
        )
    return finished


def save_evaluations(cell_dir: Path, contents: Contents) -> None:
    """Adds to the evaluation.json of each run. Raises UserError where nothing can be written."""
    for seed, content in contents.items():
        path = seed_dir(cell_dir, seed) / EVALUATION_FILE
        with refusing_denied(path, "the numbers are printed, but not saved"):
            write_evaluation(path.parent, (read_json(path) if path.exists() else {}) | content)


def _evaluate(cell: Cell, cell_dir: Path, seeds: list[int]) -> Contents:
    precision = cell.cfg.trainer.precision
    networks = [cell.build(seed) for seed in seeds]
    for seed, network in zip(seeds, networks, strict=True):
        load_weights(network, seed_dir(cell_dir, seed), precision=precision)
    replicas = arrange_replicas(cell, seeds, networks)
    task = build_task(cell, seeds, replicas, Recorder([]))
    evaluation = StatisticsEvaluation(cell.evaluation)
    evaluate(task, evaluation, accelerator=cell.cfg.trainer.accelerator, precision=precision)
    return {seed: evaluation.content(task, index) for index, seed in enumerate(seeds)}


def print_evaluations(cell: Cell, contents: Contents) -> None:
    """A table, a row for each kind of statistics: mean over seeds, with the standard deviation."""
    kinds = list(dict.fromkeys(kind for c in contents.values() for kind in c if kind != "gap"))
    names = dict.fromkeys(name for c in contents.values() for k in kinds for name in c.get(k, {}))
    console = Console(highlight=False)
    if cell.invalid:
        console.print(f"INVALID, every number below: {cell.invalid}", markup=False, soft_wrap=True)
    if not kinds:
        console.print(
            f"{cell.title}: {_why_nothing(cell.evaluation)}", markup=False, soft_wrap=True
        )
        return
    console.print(f"{cell.title}: n = {len(contents)} seeds, mean (sd)", markup=False)
    metrics = [name for name in names if name != "num_samples"]
    table = Table("statistics", box=None)
    for name in metrics:
        table.add_column(Text(name))  # names may have brackets, which are no markup
    for kind in kinds:
        row = [kind, *(_cell(contents, kind, name) for name in metrics)]
        table.add_row(*map(Text, row))
    console.print(table)


def _why_nothing(plan: EvaluationPlan) -> str:
    """Of statistics that were asked for and gave no number."""
    lacks = {"batch": "mixes no samples", "precise": "keeps no running moments"}
    if plan.batch_sizes:  # they were evaluated, so no number was finite
        reason = "no number of them is finite"
    else:
        reason = "the norm " + " and ".join(
            lacks[kind] for kind in lacks if kind in plan.statistics
        )
    asked = ",".join(plan.statistics)
    return (
        f"nothing to evaluate with evaluate_with=[{asked}]: {reason}; try evaluate_with=[running]"
    )


def _cell(contents: Contents, kind: str, name: str) -> str:
    values = [c[kind][name] for c in contents.values() if name in c.get(kind, {})]
    if not values:
        return "-"
    spread = f" ({statistics.stdev(values):.4f})" if len(values) > 1 else ""
    fewer = f" n={len(values)}" if len(values) < len(contents) else ""
    return f"{statistics.mean(values):.4f}{spread}{fewer}"
