"""The content of a report: sentences, figures, tables and cells, not yet written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.config.rules import format_count
from normexp.config.spec import study_words
from normexp.errors import UserError
from normexp.records.history import History, read_history
from normexp.reporting.cells import build_cells
from normexp.reporting.charts import Figure
from normexp.reporting.curves import read_curves, seed_curves
from normexp.reporting.figures import draw_figures
from normexp.reporting.frame import StudyRecords, config_columns, metric_names, read_studies
from normexp.reporting.metric import choose_metric, describe_metric, require_metric
from normexp.reporting.ratios import answer_over_data
from normexp.reporting.sentences import Answer, answer_slices
from normexp.reporting.slices import build_slices
from normexp.reporting.style import assign_styles
from normexp.reporting.tables import (
    Table,
    cell_table,
    comparison_table,
    run_table,
    sensitivity_table,
    show,
    size_table,
)
from normexp.reporting.tuning import draw_tuning

RUN_COLUMNS = ["seed", "status", "diverged_at_step", "steps", "stopped", "error"]
# Keys that say where, when and how often a command ran; `repeat_command` sets its own.
NOT_REPEATED = (
    *("-m", "--multirun", "tune", "hydra", "dry_run", "workers", "seed", "replicas", "study"),
    "runs_dir",
)


@dataclass(frozen=True)
class Section:
    """The sentences on a slice with its figures; an answer over data sets has no figures."""

    answer: Answer
    figures: list[Figure]


@dataclass(frozen=True)
class Report:
    """The content of a report's folder.

    sections: answers over several data sets first, then a section per slice
    tuning: the curves of the searches that belong to these studies
    counts: `12 cells, 90 runs: 84 finished, 6 diverged; 3 not ended`
    waiting: one line for each cell that has no ended run yet
    problems: one line for each result that cannot be read
    """

    title: str
    directory: Path
    sections: list[Section]
    tables: list[Table]
    tuning: list[Figure]
    cells: pd.DataFrame
    runs: pd.DataFrame
    counts: str
    waiting: list[str]
    problems: list[str]

    @property
    def cell_table(self) -> Table:
        return next(table for table in self.tables if table.name == "cells")

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures] + self.tuning


def build_report(
    runs_dir: Path,
    names: Sequence[str],
    *,
    metric: str | None = None,
    tolerance: float | None = None,
) -> Report:
    """Reads the studies and draws up their report; writes nothing.

    Raises:
        UserError: a study that is missing or empty, or a metric that no run has.
    """
    records = read_studies(runs_dir, names)
    runs = records.runs
    require_metric(metric, metric_names(runs))
    cells = build_cells(records)
    slices = build_slices(cells, runs, metric=metric, tolerance=tolerance)
    answers = answer_slices(slices)
    styles = assign_styles(cells["norm"])
    sections = [Section(answer, draw_figures(answer.parts[0], styles)) for answer in answers]
    if len(names) == 1:
        sections = [*(Section(answer, []) for answer in answer_over_data(slices)), *sections]
    tables = [
        *map(size_table, slices),
        sensitivity_table(answers),
        comparison_table(answers),
        cell_table(cells, runs, metric, tolerance),
        run_table(cells, runs),
    ]
    searched = [f"{name}{end}" for name in names for end in ("", "-search")]
    return Report(
        title=" and ".join(names),
        directory=runs_dir / "+".join(names) / "report",
        sections=sections,
        tables=tables,
        tuning=draw_tuning([runs_dir / name for name in searched]),
        cells=cells,
        runs=runs,
        counts=_count_words(cells, records),
        waiting=records.waiting,
        problems=records.problems,
    )


def _count_words(cells: pd.DataFrame, records: StudyRecords) -> str:
    ended = {status: int(cells[status].sum()) for status in ("finished", "diverged", "failed")}
    lost = {
        "not ended": records.num_unended,
        "unreadable": len(records.problems),
        "seeds missing": int(cells["missing"].sum()),
    }
    head = f"{format_count(len(cells), 'cell')}, {format_count(sum(ended.values()), 'run')}: "
    words = ", ".join(f"{count} {status}" for status, count in ended.items() if count)
    return head + words + "".join(f"; {count} {word}" for word, count in lost.items() if count)


# Details of a cell, which the page shows when it is opened


def cell_details(cells: pd.DataFrame, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """For each cell, in order: its runs, their curves, config and environment, and its command."""
    histories: dict[Path, History] = {}
    for study in {Path(cell).parent for cell in cells["cell"]}:
        histories[study] = History()
        with suppress(UserError):  # a report does not depend on the history
            histories[study] = read_history(study)
    curves = dict(list(read_curves(runs).groupby("cell")))
    own_runs = dict(list(runs.groupby("cell")))
    found = []
    for cell in map(Path, cells["cell"]):
        own = own_runs[str(cell)]
        names = metric_names(own)
        selected = describe_metric(choose_metric(names, None) or "val/loss").selection_name
        shown = own[[*RUN_COLUMNS, *names]].dropna(axis="columns", how="all")
        heads = (str(name).replace("_", " ").replace("@", " @") for name in shown)
        environment = own.filter(regex=r"^environment\.")
        drawn = curves.get(str(cell), pd.DataFrame())
        found.append(
            {
                "directory": str(cell),
                "command": repeat_command(histories[cell.parent], cell, sorted(own["seed"])),
                "columns": [head.replace("/", "/\u200b") for head in heads],
                "runs": shown.map(show).to_numpy().tolist(),
                "curves": seed_curves(drawn, ["train/loss", selected]) if len(drawn) else {},
                "config": _values(own[config_columns(own)]),
                "environment": _values(environment.rename(columns=lambda key: key[12:])),
            }
        )
    return found


def _values(table: pd.DataFrame) -> dict[str, str]:
    """Each key with its distinct values over the rows; keys without a value are left out."""
    found = {
        key: ", ".join(show(value) for value in table[key].dropna().unique())
        for key in sorted(map(str, table))
    }
    return {key: text for key, text in found.items() if text}


def repeat_command(history: History, cell: Path, seeds: Sequence[int]) -> str:
    """A command that trains this cell alone, or finds it recorded; empty if none is known.

    Derived from the last command that included the cell, with the cell's values in place of lists.
    """
    asked = [
        (entry.command, title)
        for entry in history.commands
        for cell_id, points in entry.cells.items()
        for title, _ in points
        if history.same_as(cell_id) == cell.name
    ]
    if not asked:
        return ""
    typed, title = asked[-1]
    own = re.split(r" (?=[+~]*[\w./@]+=)", title)
    own_keys = {_key(word) for word in own}
    kept = [
        word
        for word in typed[1:]
        if _key(word) not in own_keys and _key(word).partition(".")[0] not in NOT_REPEATED
    ]
    place = study_words(cell.parent)
    count = [f"seed={seeds[0]}", f"replicas={len(seeds)}"]
    return f"python -m normexp.train {shlex.join([*kept, *own, *place, *count])}"


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
