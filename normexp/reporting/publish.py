"""Writes a report's folder: page, figures and tables, once or whenever new results appear."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any, NoReturn

from normexp.errors import UserError
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE
from normexp.reporting.charts import Figure
from normexp.reporting.figures import draw_figures
from normexp.reporting.page import replace_folder, write_page
from normexp.reporting.report import Report, read_report, to_json
from normexp.reporting.sentences import Answer, Section
from normexp.reporting.style import assign_styles, order_norms
from normexp.reporting.tables import Table, tables_of, write_tables
from normexp.reporting.terminal import print_report

LOOK_EVERY = 2.0  # seconds between checks for new results
RELOAD_EVERY = 10  # seconds between reloads of a watched page
SHOWN_ROWS = 3000


@dataclass(frozen=True)
class Drawing:
    """A report drawn up: its tables and figures.

    sections: each section with its answers, and the figures of each, the main one first
    """

    report: Report
    tables: Sequence[Table]
    sections: Sequence[tuple[Section, Sequence[tuple[Answer, Sequence[Figure]]]]]

    @property
    def figures(self) -> list[Figure]:
        drawn = [figures for _, answers in self.sections for _, figures in answers]
        return [figure for figures in drawn for figure in figures]

    @property
    def cells(self) -> Table:
        return next(table for table in self.tables if table.name == "cells")


def draw(report: Report) -> Drawing:
    """Draws every table and figure of a report."""
    styles = assign_styles(cell.norm for cell in report.cells)

    def figures_of(answer: Answer) -> list[Figure]:
        return draw_figures(answer.parts[0], styles)

    sections = [
        (section, [(answer, figures_of(answer)) for answer in section.answers])
        for section in report.sections
    ]
    return Drawing(report, tables_of(report), sections)


def publish(
    runs_dir: Path,
    names: Sequence[str],
    *,
    metric: str | None,
    tolerance: float | None,
    watch: bool,
    reference: str | None = None,
) -> None:
    """Writes and prints the report of the studies.

    With `watch`, waits for the first result and writes it again whenever results appear, until
    Ctrl-C; the page reloads itself.

    Raises:
        UserError: a study that is missing or empty, a metric that no run has, a folder that cannot
            be written.
    """

    def write(reload_seconds: int | None) -> Drawing:
        options = {"metric": metric, "tolerance": tolerance, "reference": reference}
        drawing = draw(read_report(runs_dir, names, **options))
        _write_report(drawing, reload_seconds)
        return drawing

    if watch:
        _wait_for_result(runs_dir, names)
    seen = _stamp(runs_dir, names)
    drawing = write(RELOAD_EVERY if watch else None)
    print_report(drawing.report, drawing.cells)
    print(f"\nreport: {drawing.report.directory / 'index.html'}")
    if watch:
        print("watching for new results; Ctrl-C stops", flush=True)
        try:
            _watch(runs_dir, names, seen, lambda: write(RELOAD_EVERY))
        except KeyboardInterrupt:
            print()
            write(None)  # the final page does not reload itself
            raise


def _wait_for_result(runs_dir: Path, names: Sequence[str]) -> None:
    if not _stamp(runs_dir, names):
        print(f"waiting for the first result of {', '.join(names)}; Ctrl-C stops", flush=True)
    while not _stamp(runs_dir, names):
        time.sleep(LOOK_EVERY)


def _watch(
    runs_dir: Path, names: Sequence[str], seen: set[tuple[str, int]], write: Callable[[], Drawing]
) -> NoReturn:
    """Writes whenever the studies have a result that is not in `seen`."""
    while True:
        time.sleep(LOOK_EVERY)
        before, seen = seen, _stamp(runs_dir, names)
        if seen == before:
            continue
        try:
            print(f"{time.strftime('%H:%M:%S')} {write().report.counts}", flush=True)
        except UserError as error:  # as without any ended run; the last page stands
            print(f"normexp: {error}", flush=True)


def _stamp(runs_dir: Path, names: Sequence[str]) -> set[tuple[str, int]]:
    """Every result and evaluation of the studies with the time it was written."""
    stamps = set()
    for name in names:
        for file in (RESULT_FILE, EVALUATION_FILE):
            # Not Path.glob, which raises if a folder disappears meanwhile.
            for path in glob(f"{escape(str(runs_dir / name))}/*/seed-*/{file}"):
                with suppress(FileNotFoundError):  # just removed by a rerun
                    stamps.add((path, os.stat(path).st_mtime_ns))
    return stamps


def _write_report(drawing: Drawing, reload_seconds: int | None) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        content = json.dumps(to_json(drawing.report), indent=1, allow_nan=False)
        (folder / "report.json").write_text(content, encoding="utf-8")
        write_tables(folder / "tables", drawing.tables)
        # A row of the table of cells opens its runs.
        tables = [table for table in drawing.tables if table.name != "runs" and table.rows]
        write_page(
            folder,
            "page.html.j2",
            drawing.figures,
            {table.name: table.to_csv() for table in tables},
            report=drawing.report,
            sections=drawing.sections,
            side_by_side=_side_by_side,
            reload_seconds=reload_seconds,
            filters=_filters(drawing.report),
            tables=tables,
            shown_rows=SHOWN_ROWS,
        )

    replace_folder(drawing.report.directory, write)


def _side_by_side(
    answers: Sequence[tuple[Answer, Sequence[Figure]]],
) -> list[list[tuple[Answer, Figure]]]:
    """Rows of the figures after the main one: of several budgets, a row for each kind."""
    rows: dict[Any, list[tuple[Answer, Figure]]] = {}
    for answer, figures in answers:
        for figure in figures[1:]:
            row = figure.row if len(answers) == 1 else figure.kind
            rows.setdefault(row, []).append((answer, figure))
    return [*rows.values()]


def _filters(report: Report) -> dict[str, list[str]]:
    """The values of each filter; a filter with a single value is left out."""
    values = {
        "norm": order_norms(cell.norm for cell in report.cells),
        "model": sorted({cell.model for cell in report.cells}),
        "data": sorted({cell.data for cell in report.cells}),
        "size": list(map(str, sorted({size for part in report.slices for size in part.sizes}))),
    }
    return {key: known for key, known in values.items() if len(known) > 1}
