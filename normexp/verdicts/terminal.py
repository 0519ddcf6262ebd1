"""What a report prints. Imports neither pandas nor altair, so that other commands can print too."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
    """Standard output: `print` for tables, `out` for commands, which are copied; see `say`."""
    console = Console(highlight=False, emoji=False)
    if not _knows_width(console):
        console.width = PIPE_WIDTH
    return console


def _knows_width(console: Console) -> bool:
    return console.is_terminal or os.environ.get("COLUMNS", "").isdigit()


def say(console: Console, text: str, style: str = "") -> None:
    """Prints a text, broken between words if the width is known, else on one line."""
    console.print(text, style=style, markup=False, soft_wrap=not _knows_width(console))


def print_rows(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int] | None = None,
) -> None:
    """Prints a table without rules. No word is broken: a table that would is a line per cell.

    Args:
        widths: of columns, in characters, where there is room; None: those of the longest words.
    """
    cells = [*zip(columns, *rows, strict=True)]
    words = [max(len(word) for text in texts for word in text.split() or [""]) for texts in cells]
    for least in ([*map(max, widths or words, words)], words):
        room = console.width - sum(least) - 2 * len(columns)
        if room >= 0 or not _knows_width(console):
            table = Table(box=None)
            for title, width in zip(columns, _shared(room, least, cells), strict=True):
                table.add_column(Text(title), overflow="fold", min_width=width, max_width=width)
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(table, soft_wrap=room < 0)
            return
    for row in rows:
        lines = [f"{column}: {text}" for column, text in zip(columns, row, strict=True) if text]
        say(console, "\n".join(["", *lines]))


def _shared(room: int, least: Sequence[int], cells: Sequence[Sequence[str]]) -> list[int]:
    """Widths of columns, with the characters left on a line where texts lack most."""
    widths, wanted = [*least], [max(map(len, texts)) for texts in cells]
    for _ in range(room):
        lacking = [want - width for want, width in zip(wanted, widths, strict=True)]
        if max(lacking) <= 0:
            break
        widths[lacking.index(max(lacking))] += 1
    return widths


def print_report(report: Report) -> None:
    """The answer and tables of each slice, then what is missing."""
    console = open_console()
    for slice_ in report.slices:
        say(console, report.headline(slice_), "bold")
        say(console, slice_.scope, "dim")
        for table in report.tables_of(slice_):
            print_table(console, table)
        console.out("")
    for table in report.tables:
        if table.name in ("workloads", "claims", "ladders", "causes", "lost"):
            print_table(console, table)
    say(console, f"{report.title}: {report.counts}")
    for note in report.notes:
        console.print(note, markup=False)
    for problem in report.problems:
        say(console, f"not read: {problem}", "red")


def print_table(console: Console, table: ReportTable) -> None:
    """Caption, rows and note."""
    from normexp.verdicts.tables import PROSE

    say(console, f"\n{table.caption}")
    most = MAX_ROWS.get(table.name, 40)
    texts = table.frame.head(most)
    widths = []
    for name in texts:
        widest = int(texts[name].str.len().max())
        widths.append(min(LEAST_WIDTH, widest) if name in PROSE else widest)
    print_rows(console, [*texts], texts.to_numpy().tolist(), widths)
    if len(table.frame) > most:
        console.out(f"... and {len(table.frame) - most} more rows in tables/{table.name}.csv")
    if table.note:
        console.print(table.note, style="dim", markup=False)
