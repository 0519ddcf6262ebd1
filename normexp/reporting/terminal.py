"""The main table and the verdict in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from normexp.reporting.report import Report

# Columns of the main tables that only the files and the page have.
LEFT_OUT = (
    *("median [95 % interval]", "IQM [95 % interval]", "n", "seeds", "diverged", "failed"),
    *("missing", "directory", "before", "after", "before: mean", "after: mean"),
)
WRAPPED = ("note", "setting")
PIPE_WIDTH = 200  # characters, without a terminal
MOST_ROWS = 40


def print_report(report: Report) -> None:
    """Counts, the main table, the verdict, and what is missing."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(f"{report.title}: {report.counts}")
    _print_table(console, report)
    for section in report.sections:
        console.print(f"\n{section.answer.heading}", style="bold")
        if section.answer.measured_on:
            console.print(f"Measured on {section.answer.measured_on}.", style="dim")
        for one in section.answer.sentences:
            console.print(f"- {one.text}")
        if section.answer.note:
            console.print(section.answer.note, style="dim")
    for change in report.changes:
        for line in [*change.config, *change.environment, *change.alone]:
            console.print(f"  {line}")
    for line in report.waiting:
        console.print(f"not ended: {line}", style="dim")
    for problem in report.problems:
        console.print(f"not read: {problem}", style="red")


def _print_table(console: Console, report: Report) -> None:
    table = report.main_table
    if table.frame.empty:
        console.print("no cell is in both studies: nothing to compare", style="red")
        return
    same, texts = table.split()
    texts = texts.drop(columns=[name for name in LEFT_OUT if name in texts])
    common = [f"{name} {text}" for name, text in same.items() if name not in LEFT_OUT]
    console.print(", ".join(common))
    if "count" in table.frame:
        texts["seeds"] = table.frame["count"]
    drawn = RichTable(box=None)
    for column in texts:
        drawn.add_column(Text(str(column)), no_wrap=column not in WRAPPED)
    for row in texts.head(MOST_ROWS).to_numpy().tolist():
        drawn.add_row(*map(Text, row))
    console.print(drawn)
    if "count" in table.frame and table.frame["count"].str.contains("[×!?]").any():
        console.print("seeds: finished/wanted, × diverged, ! failed, ? missing", style="dim")
    if len(texts) > MOST_ROWS:
        console.print(f"... and {len(texts) - MOST_ROWS} more rows in tables/{table.name}.md")
