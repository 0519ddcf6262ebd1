"""What a report prints. Imports neither pandas nor altair, so that other commands can print too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from normexp.verdicts.report import Report
    from normexp.verdicts.tables import Table as ReportTable

PIPE_WIDTH = 100  # characters, if there is neither a terminal nor COLUMNS
LEAST_WIDTH = 30  # characters: a column that wraps is not narrower
MAX_ROWS = {"lost": 10, "claims": 80}  # other tables show 40 rows


def open_console() -> Console:
    """Standard output: `print` for tables, `out` for verbatim text."""
    console = Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = PIPE_WIDTH
    return console


def text_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table without rules, whose texts may hold brackets; lines break between words."""
    table = Table(box=None)
    rows = [[*row] for row in rows]
    for index, title in enumerate(columns):
        words = " ".join([title, *(row[index] for row in rows)]).split()
        table.add_column(Text(title), overflow="fold", min_width=max(map(len, words), default=0))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_report(report: Report) -> None:
    """The answer and tables of each slice, then what is missing."""
    console = open_console()
    for slice_ in report.slices:
        console.print(report.headline(slice_), style="bold", markup=False, soft_wrap=True)
        console.print(slice_.scope, style="dim", markup=False, soft_wrap=True)
        for table in report.tables_of(slice_):
            print_table(console, table)
        console.out("")
    for table in report.tables:
        if table.name in ("workloads", "claims", "ladders", "causes", "lost"):
            print_table(console, table)
    console.out(f"{report.title}: {report.counts}")
    for note in report.notes:
        console.print(note, markup=False)
    for problem in report.problems:
        console.out(f"not read: {problem}", style="red")


def print_table(console: Console, table: ReportTable) -> None:
    """Caption, rows and note."""
    from normexp.verdicts.tables import PROSE

    console.print(f"\n{table.caption}", markup=False, soft_wrap=True)
    most = MAX_ROWS.get(table.name, 40)
    texts = table.frame.head(most)
    drawn = text_table(texts.columns, texts.to_numpy().tolist())
    for name, column in zip(texts, drawn.columns, strict=True):
        widest = int(texts[name].str.len().max())
        column.min_width = min(LEAST_WIDTH, widest) if name in PROSE else widest
    console.print(drawn, soft_wrap=True)
    if len(table.frame) > most:
        console.out(f"... and {len(table.frame) - most} more rows in tables/{table.name}.csv")
    if table.note:
        console.print(table.note, style="dim", markup=False)
