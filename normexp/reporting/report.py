"""The content of a report: sentences, figures and tables, not yet written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from normexp.reporting.cells import build_cells
from normexp.reporting.charts import Figure
from normexp.reporting.compare import Change, compare_studies, difference_table
from normexp.reporting.figures import draw_figures
from normexp.reporting.frame import StudyRecords, metric_names, read_studies
from normexp.reporting.metric import require_metric
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
    size_table,
)
from normexp.reporting.tuning import draw_tuning


@dataclass(frozen=True)
class Section:
    """The sentences on a slice with its figures; an answer over several data sets has none."""

    answer: Answer
    figures: list[Figure]


@dataclass(frozen=True)
class Report:
    """What is written to a folder.

    sections: answers over several data sets first, then a section per slice
    changes: the later studies against the first
    tuning: the curves of the searches that chose for these studies
    counts: `12 cells, 90 runs: 84 finished, 6 diverged; 3 not ended`
    waiting: one line for each cell that has no ended run yet
    problems: one line for each result that cannot be read
    """

    title: str
    directory: Path
    sections: list[Section]
    changes: list[Change]
    tables: list[Table]
    tuning: list[Figure]
    cells: pd.DataFrame
    runs: pd.DataFrame
    counts: str
    waiting: list[str]
    problems: list[str]

    @property
    def main_table(self) -> Table:
        """Of the differences between studies, else of the cells."""
        return {table.name: table for table in self.tables}[
            "differences" if self.changes else "cells"
        ]

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
    over_data = answer_over_data(slices) if len(names) == 1 else []
    answers = answer_slices(slices)
    changes = compare_studies(cells, runs, metric) if len(names) > 1 else []
    styles = assign_styles(cells["norm"])
    tables = [
        *map(size_table, slices),
        sensitivity_table(answers),
        comparison_table(answers),
        cell_table(cells, runs, metric, tolerance),
        run_table(cells, runs),
    ]
    return Report(
        title=" and ".join(names),
        directory=runs_dir / "+".join(names) / "report",
        sections=[Section(answer, []) for answer in over_data]
        + [Section(answer, draw_figures(answer.parts[0], styles)) for answer in answers],
        changes=changes,
        tables=[difference_table(changes), *tables] if changes else tables,
        tuning=draw_tuning(
            [runs_dir / f"{name}{end}" for name in names for end in ("", "-search")]
        ),
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
    numbers = {"cell": len(cells), "run": sum(ended.values())}
    head = ", ".join(f"{count} {noun}{'s' * (count != 1)}" for noun, count in numbers.items())
    words = ", ".join(f"{count} {status}" for status, count in ended.items() if count)
    return f"{head}: {words}" + "".join(f"; {n} {word}" for word, n in lost.items() if n)
