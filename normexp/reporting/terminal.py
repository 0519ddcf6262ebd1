"""The main table and the verdict in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from normexp.reporting.report import Report
from normexp.reporting.tables import show
from normexp.reporting.verdict import Answer

# The columns of a main table that a terminal shows, with their names there.
COLUMNS = {
    "cells": {
        "norm": "norm",
        "model": "model",
        "data": "data",
        "setting": "setting",
        "batch size": "batch",
        "norm batch size": "norm batch",
        "lr": "lr",
        "metric": "metric",
        "mean [95 % interval]": "mean [95 %]",
        "count": "seeds",
        "note": "note",
    },
    "differences": {
        "norm": "norm",
        "setting": "setting",
        "after - before [95 % interval]": "after - before",
        "n pairs": "pairs",
    },
}
ONLY_IF_VARYING = ("model", "data", "lr", "metric")
PIPE_WIDTH = 200  # characters, without a terminal
MOST_ROWS = 40


def print_report(report: Report) -> None:
    """Counts, the main table without its empty columns, the verdict, and what is missing."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(f"{report.title}: {report.counts}", markup=False)
    _print_table(console, report)
    for section in report.sections:
        _print_answer(console, section.answer)
    for change in report.changes:
        for line in [*change.config, *change.environment, *change.alone]:
            console.print(f"  {line}", markup=False)
    for line in report.waiting:
        console.print(f"not ended: {line}", markup=False, style="dim")
    for problem in report.problems:
        console.print(f"not read: {problem}", markup=False, style="red")


def _print_table(console: Console, report: Report) -> None:
    table = report.tables[0]
    rows, names = table.rows, COLUMNS[table.name]
    if not rows:
        console.print("no cell is in both studies: nothing to compare", style="red")
        return
    metrics = {row["metric"] for row in rows}
    if len(metrics) == 1:
        console.print(metrics.pop(), markup=False)
    kept = [c for c in names if _is_worth_showing([row[c] for row in rows], c)]
    drawn = RichTable(box=None)
    for column in kept:
        drawn.add_column(Text(names[column]), no_wrap=column not in ("note", "setting"))
    for row in rows[:MOST_ROWS]:
        drawn.add_row(*(Text(show(row[column])) for column in kept))
    console.print(drawn)
    if any(mark in str(row.get("count")) for row in rows for mark in "×!?"):
        console.print("seeds: finished/wanted, × diverged, ! failed, ? missing", style="dim")
    if len(rows) > MOST_ROWS:
        console.print(f"... and {len(rows) - MOST_ROWS} more rows in tables/{table.name}.md")


def _is_worth_showing(values: list[Any], column: str) -> bool:
    if column in ONLY_IF_VARYING:
        return len(set(values)) > 1
    return any(value not in (None, "") for value in values)


def _print_answer(console: Console, answer: Answer) -> None:
    console.print(f"\n{answer.heading}", markup=False, style="bold")
    for one in answer.sentences:
        console.print(f"- {one.text}", markup=False)
    if answer.note:
        console.print(answer.note, markup=False, style="dim")
