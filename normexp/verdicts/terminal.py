"""What a report prints. Imports neither pandas nor altair, so that other commands can print too."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from operator import sub
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from normexp.verdicts.report import Report
    from normexp.verdicts.tables import Table as ReportTable

PIPE_WIDTH = 160  # characters, so that most rows are one line, where no width is known
LEAST_WIDTH = 30  # characters: a column that wraps is not narrower
MAX_ROWS = {"lost": 10, "claims": 80}  # other tables show 40 rows


def open_console() -> Console:
    """Standard output: `print` for tables and prose, `out` for commands, which are copied.

    Prose is broken between words where the width is known, and one line elsewhere.
    """
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width, console.soft_wrap = PIPE_WIDTH, True
    return console


def print_rows(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Collection[str] = (),
) -> None:
    """Prints a table without rules. No word is broken: a table that would is a line per cell.

    Args:
        numbers: columns whose texts stay on one line, where there is room.
    """
    words, wanted = [], []  # of each column: the length of its longest word and of its longest text
    # The least lengths if numbers stay on one line; if their headings do, too.
    unbroken, entire = [], []
    for title, *texts in zip(columns, *rows, strict=True):
        words.append(max(map(len, " ".join([title, *texts]).split()), default=0))
        wanted.append(max(map(len, [title, *texts])))
        longest = max(map(len, texts), default=0)
        is_number = title in numbers
        unbroken.append(max(words[-1], longest) if is_number else words[-1])
        entire.append(wanted[-1] if is_number else max(words[-1], min(LEAST_WIDTH, longest)))
    for least, gap in ((entire, 2), (unbroken, 2), (unbroken, 1), (words, 2)):
        room = console.width - sum(least) - gap * len(columns)
        if room >= 0:
            table = Table(box=None, padding=(0, gap - 1, 0, 1))
            lengths = [*least]
            for _ in range(room):  # what is left goes to broken numbers, then to the longest text
                broken = [*map(sub, unbroken, lengths)]
                lacking = broken if max(broken) > 0 else [*map(sub, wanted, lengths)]
                lengths[lacking.index(max(lacking))] += max(lacking) > 0
            for title, length in zip(columns, lengths, strict=True):
                table.add_column(Text(title), overflow="fold", width=length)
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(table)
            return
    for row in rows:
        lines = [f"{column}: {text}" for column, text in zip(columns, row, strict=True) if text]
        console.print("\n".join(["", *lines]))


def print_report(report: Report) -> None:
    """The answer and tables of each slice, then what is missing."""
    console = open_console()
    for slice_ in report.slices:
        console.print(report.headline(slice_), style="bold")
        console.print(slice_.scope, style="dim")
        for table in report.tables_of(slice_):
            print_table(console, table)
        console.out("")
    for table in report.tables:
        if table.name in ("workloads", "claims", "ladders", "causes", "lost"):
            print_table(console, table)
    console.print(f"{report.title}: {report.counts}")
    for note in report.notes:
        console.print(note, soft_wrap=False)
    for problem in report.problems:
        console.print(f"not read: {problem}", style="red")


def print_table(console: Console, table: ReportTable) -> None:
    """Caption, rows and note."""
    from normexp.verdicts.tables import PROSE

    console.print(f"\n{table.caption}")
    most = MAX_ROWS.get(table.name, 40)
    texts = table.frame.head(most)
    titles = [*map(str, texts)]
    numbers = [title for title in titles if title not in PROSE]
    print_rows(console, titles, texts.to_numpy().tolist(), numbers)
    if len(table.frame) > most:
        console.out(f"... and {len(table.frame) - most} more rows in tables/{table.name}.csv")
    if table.note:
        console.print(table.note, style="dim", soft_wrap=False)
