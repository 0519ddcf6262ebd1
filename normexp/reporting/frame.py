"""Reads studies into one pandas table, a row per ended run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from normexp.errors import UserError
from normexp.records.files import read_json
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE, find_study, list_runs, seed_of
from normexp.records.result import read_result
from normexp.reporting.metric import Metric

Row = dict[Any, Any]  # column to plain value
PARTS = ("norm", "model", "data", "optim")
SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")
RECORDED_TWICE = (*SIZES, "trainer")  # in the recipe and beside it
# Columns of the table of runs that come neither from the config nor from the metrics.
FIELDS = (
    *("study", "cell", "cell_id", "seed", "status", "diverged_at_step", "error", "steps"),
    *("stopped", "attempts", "invalid", "num_parameters", "directory"),
)


@dataclass(frozen=True)
class StudyRecords:
    """The records of one or more studies, as a report needs them.

    runs: a row per ended run: FIELDS; the config's values, nested keys joined by dots
        (`norm.num_groups`); metrics by name (`val/accuracy`, the only columns with a slash);
        `timing.*` and `environment.*`. `cell` is the folder of the run's cell. A missing metric is
        NaN, any other missing value None.
    num_seeds: for each study, how many seeds have a result in any of its cells, readable or not
    num_unended: runs without a result: still training, or interrupted
    waiting: one line for each cell that has begun but has no ended run
    problems: one line for each result that cannot be read
    """

    runs: pd.DataFrame
    num_seeds: dict[str, int]
    num_unended: int
    waiting: list[str]
    problems: list[str]


def read_studies(runs_dir: Path, names: Sequence[str]) -> StudyRecords:
    """Reads the studies, finished or still running.

    Raises:
        UserError: a study that does not exist, or that has no ended run.
    """
    rows, seeds, problems, unended = [], {}, [], []
    for name in names:
        root = find_study(runs_dir, name)
        own, broken, begun = [], [], []
        seeds[name] = set()
        for run_dir in list_runs(root):
            if not (run_dir / RESULT_FILE).exists():
                begun.append(run_dir)
                continue
            seeds[name].add(seed_of(run_dir))
            try:
                own.append(_read_row(name, run_dir))
            except UserError as error:
                broken.append(str(error))
        if not own:
            raise UserError(_why_empty(name, root, begun, broken))
        rows += own
        problems += broken
        unended += begun
    runs = run_frame(rows)
    counts = {name: len(found) for name, found in seeds.items()}
    return StudyRecords(runs, counts, len(unended), _waiting(unended, set(runs["cell"])), problems)


def run_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Builds the table `StudyRecords.runs` from rows by column name."""
    runs = pd.DataFrame(rows, dtype=object)
    runs = runs.reindex(columns=[*FIELDS, *(name for name in runs if name not in FIELDS)])
    return runs.where(runs.notna(), None).astype(dict.fromkeys(metric_names(runs), float))


def metric_names(runs: pd.DataFrame) -> list[str]:
    """The metrics that any of the runs has."""
    return sorted(name for name in map(str, runs) if "/" in name and runs[name].notna().any())


def config_columns(runs: pd.DataFrame) -> list[str]:
    return [
        name
        for name in map(str, runs)
        if "/" not in name
        and name not in FIELDS
        and not name.startswith(("timing.", "environment."))
    ]


def varying_columns(table: pd.DataFrame) -> list[str]:
    """The columns that vary between rows; None is a value, and 1, 1.0 and True differ."""
    return [str(name) for name in table if table[name].map(repr).nunique() > 1]


def values_of(runs: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """The metric, scaled, as (seeds, cells); NaN unless the run has finished and recorded it."""
    found = pd.Series(math.nan, runs.index) if metric.name not in runs else runs[metric.name]
    shown = metric.scale * found.where(runs["status"] == "finished")
    table = runs[["seed", "cell"]].assign(value=shown)
    return table.pivot(index="seed", columns="cell", values="value")


def paired_values(a: str, b: str, values: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Values of two cells at the seeds that have both, in order of seed."""
    first, second = values[a].to_numpy(), values[b].to_numpy()
    is_both = np.isfinite(first) & np.isfinite(second)
    return first[is_both], second[is_both]


def plain_rows(table: pd.DataFrame) -> list[Row]:
    """The rows as dicts of plain Python values; missing is None."""
    return [
        {name: None if value != value else value for name, value in row.items()}  # NaN is not NaN
        for row in table.to_dict("records")
    ]


def _read_row(study: str, run_dir: Path) -> dict[str, Any]:
    result = read_result(run_dir)
    if not isinstance(result.config.get("batch_size"), int):
        raise UserError(f"{run_dir / RESULT_FILE} has no config.batch_size; was it edited by hand?")
    own = result.to_dict()
    return (
        config_row(result.config)
        | _read_evaluation(run_dir)
        | result.metrics
        | _flatten({"timing": result.timing, "environment": result.environment})
        | {key: own[key] for key in FIELDS if key in own}
        | {"study": study, "cell": str(run_dir.parent), "directory": str(run_dir)}
    )


def config_row(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens a recorded config and its recipe to columns with dotted keys."""
    recipe = config.get("recipe", {})
    own = {key: value for key, value in config.items() if key != "recipe"}
    names = {
        group: _own_name(own[group], recipe.get(group) or {}) for group in PARTS if group in own
    }
    known = {key: value for key, value in recipe.items() if key not in RECORDED_TWICE}
    return _flatten(known) | _flatten(own) | names


def _own_name(choice: str, part: Mapping[str, Any]) -> str:
    """`group`; `MyNorm` for a user's own class; `resnet50` for one of torchvision's models."""
    if isinstance(part.get("name"), str):
        return part["name"]
    return (
        part["_target_"].rpartition(".")[2] if choice == "custom" and "_target_" in part else choice
    )


def _read_evaluation(run_dir: Path) -> dict[str, float]:
    """Metrics of evaluation.json: {"precise": {"test/loss": 1.0}} gives `test/loss@precise`."""
    path = run_dir / EVALUATION_FILE
    if not path.exists():
        return {}
    return {
        name if statistics == "running" else f"{name}@{statistics}": value
        for statistics, metrics in read_json(path).items()
        if isinstance(metrics, dict)
        for name, value in metrics.items()
        if "/" in name and isinstance(value, float) and math.isfinite(value)
    }


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"norm": {"eps": 1}} gives {"norm.eps": 1}; lists become tuples.

    A class of normexp is reduced to its name, because its module may change between two runs.
    """
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif key == "_target_" and str(value).startswith("normexp."):
            flat[f"{prefix}{key}"] = value.rpartition(".")[2]
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def _why_empty(name: str, root: Path, unended: list[Path], problems: list[str]) -> str:
    if problems:
        return f"study={name} has no readable result; the first problem: {problems[0]}"
    if unended:
        return (
            f"study={name} has no ended run yet, {len(unended)} in {root} have started; "
            "try again when the first has ended"
        )
    return f"study={name} is empty: {root} has no runs; train one with study={name}"


def _waiting(unended: Sequence[Path], ended: set[str]) -> list[str]:
    begun = Counter(run_dir.parent for run_dir in unended)
    return [
        f"{cell.name}: {count} run{'s' * (count > 1)} begun, none ended"
        for cell, count in begun.items()
        if str(cell) not in ended
    ]
