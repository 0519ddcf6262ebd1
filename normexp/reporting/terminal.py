"""What the commands report, status and evaluate print. Without torch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from normexp.config.words import format_count

if TYPE_CHECKING:
    from normexp.reporting.report import Report
    from normexp.reporting.tables import Table as ReportTable

PIPE_WIDTH = 100  # characters, without a terminal and without COLUMNS
WRAPPED = ("why", "lost", "lr", "claim")
LEAST_WIDTH = 30  # characters of a column that wraps
MAX_ROWS = {"lost": 10, "claims": 80}  # of a table; else 40
SHORT = 60  # characters of a text that a table shows itself
ENTRIES = {"normexp-train": "python -m normexp.train", "normexp-tune": "python -m normexp.tune"}
Contents = Mapping[int, Mapping[str, Any]]  # the content of evaluation.json by seed


def open_console() -> Console:
    """Standard output: `print` for tables, `out` for verbatim text."""
    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(highlight=False, width=PIPE_WIDTH)


def text_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table without rules, whose texts may hold brackets."""
    table = Table(box=None)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def titled_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | Group:
    """A table of cells; below it stand the words that all titles in its column `cell` share.

    The norm stays in every title.
    """
    at = columns.index("cell")
    titles = [row[at].split() for row in rows]
    first, others = [] if len(titles) < 2 else titles[0], titles[1:]
    shared = [w for w in first if not w.startswith("norm=") and all(w in one for one in others)]
    rests = [" ".join(word for word in title if word not in shared) for title in titles]
    shown = [
        [*row[:at], rest or row[at], *row[at + 1 :]] for row, rest in zip(rows, rests, strict=True)
    ]
    table = text_table(columns, shown)
    return Group(table, Text(f"all with {' '.join(shared)}")) if shared else table


class Footnotes:
    """Long texts of a table, printed once below it."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        """`refused [1]` for `refused: ...`; a short text is left as it is."""
        if len(text) <= SHORT:
            return text
        head, colon, rest = text.partition(": ")
        if not colon or head != "refused":
            head, rest = "", text
        if rest not in self._texts:
            self._texts.append(rest)
        return f"{head} [{self._texts.index(rest) + 1}]".lstrip()

    def print(self, console: Console) -> None:
        for number, text in enumerate(self._texts, start=1):
            console.out(f"[{number}] {text}")


def print_report(report: Report) -> None:
    """The answer and tables of each slice, then what is missing."""
    console = open_console()
    for part in report.slices:
        console.print(report.headline(part), style="bold", markup=False, soft_wrap=True)
        console.print(part.scope, style="dim", markup=False, soft_wrap=True)
        for table in report.tables_of(part):
            print_table(console, table)
        console.out("")
    shown = {"ranking", "claims", "causes", "lost"}
    for table in report.tables:
        if table.name in shown:
            print_table(console, table)
    console.out(f"{report.title}: {report.counts}")
    for problem in report.problems:
        console.out(f"not read: {problem}", style="red")


def print_table(console: Console, table: ReportTable) -> None:
    """Caption, rows and note."""
    console.print(f"\n{table.caption}", markup=False, soft_wrap=True)
    most = MAX_ROWS.get(table.name, 40)
    texts = table.frame.head(most)
    drawn = text_table(texts.columns, texts.to_numpy().tolist())
    for name, column in zip(texts, drawn.columns, strict=True):
        widest = int(texts[name].str.len().max())
        column.min_width = min(LEAST_WIDTH, widest) if name in WRAPPED else widest
    console.print(drawn, soft_wrap=True)
    if len(table.frame) > most:
        console.out(f"... and {len(table.frame) - most} more rows in tables/{table.name}.csv")
    if table.note:
        console.print(table.note, style="dim", markup=False)


def print_evaluations(
    contents: Contents, title: str, *, why_nothing: str, invalid: str | None
) -> None:
    """Prints a table with a row per kind of statistics: mean and standard deviation over seeds.

    Args:
        why_nothing: printed if there is no number.
        invalid: why the numbers must not be compared; None if they may.
    """
    kinds = list(dict.fromkeys(kind for c in contents.values() for kind in c))
    names = dict.fromkeys(name for c in contents.values() for k in kinds for name in c.get(k, {}))
    console = open_console()
    if invalid:
        console.out(f"INVALID, every number below: {invalid}")
    if not kinds:
        console.out(f"{title}: {why_nothing}")
        return
    console.out(f"{title}: n = {format_count(len(contents), 'seed')}, mean (sd)")
    rows = [[kind, *(_spread(contents, kind, name) for name in names)] for kind in kinds]
    console.print(text_table(["statistics", *names], rows))


def _spread(contents: Contents, kind: str, name: str) -> str:
    values = [c[kind][name] for c in contents.values() if name in c.get(kind, {})]
    if not values:
        return "-"
    spread = f" ({statistics.stdev(values):.4f})" if len(values) > 1 else ""
    fewer = f" n={len(values)}" if len(values) < len(contents) else ""
    return f"{statistics.mean(values):.4f}{spread}{fewer}"


# The status of a study
