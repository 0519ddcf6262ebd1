"""What the page shows of a cell when it is opened: runs, curves, config, environment, command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from normexp.batching.sizes import SIZES
from normexp.config.spec import study_words
from normexp.records.study import Study, read_study
from normexp.reporting.curves import curve_table, seed_curves
from normexp.reporting.metric import choose_metric, describe_metric
from normexp.reporting.model import CellRow, Config, metric_names
from normexp.reporting.read import flatten
from normexp.reporting.tables import run_fields, show

RUN_COLUMNS = ["seed", "status", "diverged_at_step", "steps", "stopped", "error"]
# Keys that say where, when and how often a command ran; `repeat_command` sets its own.
NOT_REPEATED = (
    *("-m", "--multirun", "tune", "hydra", "dry_run", "workers", "seed", "replicas", "study"),
    "runs_dir",
)


def cell_details(cells: Sequence[CellRow]) -> list[dict[str, Any]]:
    """The details of each cell, as plain values."""
    histories: dict[Path, Study] = {}
    for study in {cell.directory.parent for cell in cells}:
        histories[study] = read_study(study)
    return [_details_of(cell, histories[cell.directory.parent]) for cell in cells]


def _details_of(cell: CellRow, history: Study) -> dict[str, Any]:
    names = metric_names([cell])
    selected = describe_metric(choose_metric(names, None) or "val/loss").selection_name
    rows = [run_fields(run) | dict(run.metrics) for run in cell.runs]
    known = [
        name for name in (*RUN_COLUMNS, *names) if any(row.get(name) is not None for row in rows)
    ]
    heads = (name.replace("_", " ").replace("@", " @") for name in known)
    curves = curve_table(cell.runs)
    seeds = [run.seed for run in cell.runs]
    return {
        "directory": str(cell.directory),
        "command": repeat_command(history, cell.directory, seeds),
        "columns": [head.replace("/", "/\u200b") for head in heads],
        "runs": [[show(row.get(name)) for name in known] for row in rows],
        "curves": seed_curves(curves, ["train/loss", selected]) if len(curves) else {},
        "config": _distinct(run.config for run in cell.runs),
        "environment": _distinct(flatten(run.result.environment) for run in cell.runs),
    }


def _distinct(configs: Iterable[Config]) -> dict[str, str]:
    """Each key with its distinct values; keys without a value are left out."""
    values: dict[str, dict[str, None]] = {}
    for config in configs:
        for key, value in config.items():
            if value is not None:
                values.setdefault(key, {})[show(value)] = None
    return {key: ", ".join(values[key]) for key in sorted(values)}


def repeat_command(history: Study, cell: Path, seeds: Sequence[int]) -> str:
    """A command that trains this cell alone, or finds it recorded; empty if none is known.

    Derived from the last command that included the cell, with the cell's values in place of lists.
    """
    asked = [
        (entry.command, entry.cells[cell.name].title)
        for entry in history.commands
        if cell.name in entry.cells
    ]
    if not asked:
        return ""
    typed, title = asked[-1]
    title_words = re.split(r" (?=[+~]*[\w./@]+=)", title)
    own_keys = {*SIZES, *map(_key, title_words)}  # a title has every size that is not null
    kept = [
        word
        for word in typed[1:]
        if _key(word) not in own_keys and _key(word).partition(".")[0] not in NOT_REPEATED
    ]
    place = study_words(cell.parent)
    count = [f"seed={seeds[0]}", f"replicas={len(seeds)}"]
    return f"python -m normexp.train {shlex.join([*kept, *title_words, *place, *count])}"


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
