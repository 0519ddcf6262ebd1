"""The runs of a study as they lie on disk: ended, unended, and files that are not ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.files import read_json
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE, Study, find_study
from normexp.records.result import Result, read_run


@dataclass(frozen=True)
class Run:
    """One ended run: its result and where it lies."""

    study: str
    directory: Path
    result: Result


@dataclass(frozen=True)
class StudyRuns:
    """Everything that a report needs to know of one study.

    unended: run directories without a result: still training, or interrupted
    problems: one line for each result that cannot be read
    unreadable: the run directories of these
    """

    name: str
    root: Path
    runs: list[Run]
    unended: list[Path]
    problems: list[str]
    unreadable: list[Path] = field(default_factory=list)


def load_runs(runs_dir: Path, name: str) -> StudyRuns:
    """Reads a study, also while it runs; UserError where it is missing or has no ended run."""
    root = find_study(runs_dir, name)
    runs, unended, problems, unreadable = [], [], [], []
    for run_dir in Study(root).list_runs():
        if not (run_dir / RESULT_FILE).exists():
            unended.append(run_dir)
            continue
        try:
            runs.append(Run(name, run_dir, _read(run_dir)))
        except UserError as error:
            problems.append(str(error))
            unreadable.append(run_dir)
    if not runs:
        raise UserError(_reason_for_nothing(name, root, unended, problems))
    return StudyRuns(name, root, runs, unended, problems, unreadable)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots: {"norm": {"eps": 1}} gives {"norm.eps": 1}."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def _read(run_dir: Path) -> Result:
    result = read_run(run_dir)
    if not isinstance(result.config.get("batch_size"), int):
        raise UserError(f"{run_dir / RESULT_FILE} has no config.batch_size; was it edited by hand?")
    return replace(result, metrics={**_evaluated(run_dir), **result.metrics})


def _evaluated(run_dir: Path) -> dict[str, float]:
    """Metrics of evaluation.json, {"precise": {"test/loss": 1.0}} as `test/loss@precise`."""
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


def _reason_for_nothing(name: str, root: Path, unended: list[Path], problems: list[str]) -> str:
    if problems:
        return f"study={name} has no readable result; the first problem: {problems[0]}"
    if unended:
        return (
            f"study={name} has no ended run yet, {len(unended)} in {root} have begun; "
            "try again when the first cell has ended"
        )
    return f"study={name} is empty: {root} has no runs; train one with study={name}"
