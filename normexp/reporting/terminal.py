"""What the commands report, status and evaluate print. Without torch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.config.rules import format_count
from normexp.reporting.metric import COUNT_MARKS

if TYPE_CHECKING:
    from normexp.reporting.ranking import Ranking
    from normexp.reporting.report import Report
    from normexp.reporting.tables import Table as ReportTable

PIPE_WIDTH = 100  # characters, without a terminal and without COLUMNS
# Columns of a report's table of cells that only the files and the page show.
LEFT_OUT = (*("n", "seeds", "diverged", "failed", "missing", "directory"),)
WRAPPED = ("note", "setting")
LEAST_WIDTH = 11  # characters of a column that wraps
MAX_ROWS = 40
SHORT = 60  # characters of a text that a table shows itself
ENTRIES = {"normexp-train": "python -m normexp.train", "normexp-tune": "python -m normexp.tune"}
Contents = Mapping[int, Mapping[str, Any]]  # the content of evaluation.json by seed


def open_console() -> Console:
    """Standard output: `print` for tables, `out` for verbatim text."""
    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(highlight=False, width=PIPE_WIDTH)


def text_table(columns: Iterable[str], rows: Iterable[Iterable[str]], **options: Any) -> Table:
    """A table without rules, whose texts may hold brackets."""
    table = Table(box=None, **options)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


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


def print_report(report: Report, cells: ReportTable) -> None:
    """Counts, the rankings, the table of cells, the verdicts, and what is missing."""
    console = open_console()
    console.out(f"{report.title}: {report.counts}")
    for section in report.sections:
        rankings = [one for answer in section.answers for one in report.rankings_of(answer)]
        headline = section.headline
        if headline and section.leads(rankings):
            console.print(f"\n{section.heading}", markup=False)
            style = "bold" if headline.is_answer else ""
            console.print(f"{headline.claim}.", style=style, markup=False)
        for ranking in rankings:
            _print_ranking(console, ranking)
    if report.losses.lines:
        console.out("")
    for words in report.losses.lines:
        console.print(words, style="red", markup=False)
    console.out("\nCells", style="bold")
    _print_cells(console, cells)
    for section in report.sections:
        for answer in section.answers:
            console.out(f"\n{answer.heading}", style="bold")
            if answer.measured_on:
                console.out(f"Measured on {answer.measured_on}.", style="dim")
            for claim in answer.sentences:
                console.out(f"- {claim.text}")
    if report.note:
        console.out(f"\n{report.note}", style="dim")
    if report.untested:
        console.out("\nNot tested", style="bold")
    for heading, claim in report.untested:
        console.out(f"- {heading}: {claim.text}")
    for line in report.waiting:
        console.out(f"not ended: {line}", style="dim")
    for problem in report.problems:
        console.out(f"not read: {problem}", style="red")


def _print_ranking(console: Console, ranking: Ranking) -> None:
    """The sentence, then the norms in groups."""
    console.print(f"\n{ranking.heading}", markup=False)
    console.print(f"{ranking.sentence}.", style="bold", markup=False)
    drawn, shown = text_table(ranking.columns, []), ""
    for title, norm, *texts in ranking.rows:
        if title != shown:
            group, _, why = title.partition(": ")
            drawn.add_row(Text(group, style="bold"), "", "", Text(why))
            shown = title
        drawn.add_row(*map(Text, (f"  {norm}", *texts)))
    for column in drawn.columns[:-2]:
        column.no_wrap = True
    console.print(drawn)
    if ranking.note:
        console.print(ranking.note, style="dim", markup=False)


def _print_cells(console: Console, table: ReportTable) -> None:
    same, texts = table.split()
    texts = texts.drop(columns=[name for name in LEFT_OUT if name in texts])
    console.out(", ".join(f"{name} {text}" for name, text in same.items() if name not in LEFT_OUT))
    counts = table.frame["count"]
    texts["seeds"] = counts
    footnotes = Footnotes()
    if "note" in texts:
        texts["note"] = [footnotes.mark(text) for text in texts["note"].head(MAX_ROWS)] + [
            *texts["note"][MAX_ROWS:]
        ]
    drawn = text_table(map(str, texts), texts.head(MAX_ROWS).to_numpy().tolist())
    for name, column in zip(texts, drawn.columns, strict=True):
        widest = int(texts[name].str.len().max())
        column.min_width = min(LEAST_WIDTH, widest) if name in WRAPPED else widest
    console.print(drawn, soft_wrap=True)
    footnotes.print(console)
    if counts.str.contains("/").any():
        console.out(f"seeds: finished/wanted, {COUNT_MARKS}", style="dim")
    if table.note:
        console.print(table.note, style="dim", markup=False)
    if len(texts) > MAX_ROWS:
        console.out(f"... and {len(texts) - MAX_ROWS} more rows in tables/{table.name}.md")


def print_evaluations(
    contents: Contents, title: str, *, why_nothing: str, invalid: str | None
) -> None:
    """Prints a table with a row per kind of statistics: mean and standard deviation over seeds.

    Args:
        why_nothing: printed if there is no number.
        invalid: why the numbers must not be compared; None if they may.
    """
    recorded = dict.fromkeys(kind for c in contents.values() for kind in c)
    kinds = [kind for kind in recorded if kind not in ("asked", "gap")]
    names = dict.fromkeys(name for c in contents.values() for k in kinds for name in c.get(k, {}))
    names.pop("num_samples", None)
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
