"""What the commands report, status and evaluate print. Without torch."""

from __future__ import annotations

import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.config.rules import format_count
from normexp.config.spec import split_shared_words, study_words
from normexp.records.history import CommandEntry
from normexp.records.result import Status
from normexp.records.state import STATES, StudyStatus, commands_by_number, is_search

if TYPE_CHECKING:
    from normexp.reporting.report import Report
    from normexp.reporting.tables import Table as ReportTable

PIPE_WIDTH = 100  # characters, without a terminal and without COLUMNS
WRAPPED = ("why", "lost", "lr")
LEAST_WIDTH = 30  # characters of a column that wraps
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
        if not colon or head not in (Status.REFUSED, Status.FAILED):
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
    shown = {"ranking", "causes", "lost"}
    for table in report.tables:
        if table.name in shown:
            print_table(console, table)
    console.out(f"{report.title}: {report.counts}")
    for problem in report.problems:
        console.out(f"not read: {problem}", style="red")


def print_table(console: Console, table: ReportTable) -> None:
    """Caption, rows and note."""
    console.print(f"\n{table.caption}", markup=False, soft_wrap=True)
    texts = table.frame.head(MAX_ROWS)
    drawn = text_table(texts.columns, texts.to_numpy().tolist())
    for name, column in zip(texts, drawn.columns, strict=True):
        widest = int(texts[name].str.len().max())
        column.min_width = min(LEAST_WIDTH, widest) if name in WRAPPED else widest
    console.print(drawn, soft_wrap=True)
    if len(table.frame) > MAX_ROWS:
        console.out(f"... and {len(table.frame) - MAX_ROWS} more rows in tables/{table.name}.csv")
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


def print_status(status: StudyStatus) -> None:
    """Prints a row per cell, the commands so far, and the command to type next."""
    console, runs = open_console(), status.runs
    footnotes = Footnotes()
    console.print(_status_table(status, footnotes))
    footnotes.print(console)
    counts = ", ".join(f"{runs[state]} {state}" for state in STATES if runs[state])
    num_refused = sum(bool(cell.refused) for cell in status.cells)
    refused = f"; {format_count(num_refused, 'cell')} refused" if num_refused else ""
    total = f"{format_count(sum(runs.values()), 'run')} of {_count_cells(status)}"
    console.out(f"{status.root}: {total}: {counts}{refused}")
    if status.history.typed:
        console.out("commands so far:")
    for number, (command, *again) in commands_by_number(status.history).items():
        mark = "forgotten: " if command.id in status.history.forgotten else ""
        last = f" (typed {len(again) + 1} times, last at {again[-1].time})" if again else ""
        console.out(f"  {number}  {command.time}  {mark}{_as_typed(command.command)}{last}")
    if status.ignored:
        count = format_count(len(status.ignored), "run")
        console.out(f"only forgotten commands asked for {count}, which no report counts; remove")
        console.out("these folders if nobody needs them, or type the command again to keep them:")
    for folder in status.ignored:
        console.out(f"  {folder}")
    for line in _next(status):
        console.out(line)


def _count_cells(status: StudyStatus) -> str:
    """`30 cells`, without those refused."""
    return format_count(sum(not cell.refused for cell in status.cells), "cell")


def _status_table(status: StudyStatus, footnotes: Footnotes) -> Table:
    """A row per cell; what all titles share is the caption."""
    states = [state for state in STATES if status.runs[state]]
    named = [cell.title for cell in status.cells if cell.is_asked and not cell.refused]
    shared, apart = split_shared_words(named)
    short_titles = dict(zip(named, apart, strict=True))
    rows = []
    for cell in status.cells:
        title = short_titles.get(cell.title, cell.title)
        if cell.refused:
            title = " ".join(w for w in title.split() if w not in shared.split()) or title
        count = Counter(cell.states.values())
        notes = [cell.refused, *cell.notes] if cell.refused else cell.notes
        shown = "; ".join(map(footnotes.mark, notes))
        rows.append([title, *(str(count[state] or "-") for state in states), shown])
    caption = Text(f"all with {shared}") if shared else None
    return text_table(["cell", *states, ""], rows, caption=caption, caption_justify="left")


def _as_typed(command: Sequence[str]) -> str:
    return " ".join([ENTRIES.get(command[0], command[0]), shlex.join(command[1:])])


def _again(root: Path, command: CommandEntry, *, max_attempts: int | None) -> str:
    """A recorded command, adapted to the study's present folder and name.

    Args:
        max_attempts: how often a run may fail; None keeps the typed value.
    """
    keys = "study|runs_dir" if max_attempts is None else "study|runs_dir|max_attempts|retry_failed"
    typed = command.command
    words = [word for word in typed if not re.match(rf"\+*({keys})=", word)]
    name = root.name
    if is_search(command) and not any(re.match(r"study=.*-search$", word) for word in typed):
        name = name.removesuffix("-search")  # trials go to a study named after the report's
    is_default = name == "default" and not any(word.startswith("experiment=") for word in typed)
    words += study_words(root.with_name(name))[is_default:]
    return _as_typed(words if max_attempts is None else [*words, f"max_attempts={max_attempts}"])


def _next(status: StudyStatus) -> list[str]:
    """The commands that finish the study, or that report on a finished one."""
    if status.is_complete:
        words = shlex.join(study_words(status.root))
        refused = [cell.title for cell in status.cells if cell.refused]
        lines = ["complete; next:", f"  python -m normexp.report {words}"]
        if not refused:
            return lines
        return [
            f"complete but for {format_count(len(refused), 'refused cell')}: {'; '.join(refused)}",
            "correct the command, or drop them from the study:",
            f"  python -m normexp.status {words} forget=REFUSED",
            "next:",
            *lines[1:],
        ]
    commands, purpose, tries = status.unfinished_commands(with_exhausted=False), "to finish", None
    most = max((n for cell in status.cells for n in cell.attempts.values()), default=0)
    if status.runs[Status.RUNNING]:
        purpose = "running now; if that stops"
    elif not commands and most:
        commands, tries = status.unfinished_commands(with_exhausted=True), most + 1
        purpose = "runs have failed as often as max_attempts allows; to try once more"
    again = [
        _again(status.root, command, max_attempts=tries)
        for command in commands or status.history.commands
    ]
    if not again:
        return ["incomplete, and study.jsonl holds no command to type again"]
    lines = [f"{purpose}, type again:", *(f"  {line}" for line in dict.fromkeys(again))]
    if purpose != "to finish":
        return lines
    return [*_what_is_left(status), *lines]


def _what_is_left(status: StudyStatus) -> list[str]:
    """What the same command does about failed runs and refused cells."""
    lines = []
    if failed := status.runs[Status.FAILED]:
        most = max((command.max_attempts for command in status.history.commands), default=1)
        lines.append(
            f"{format_count(failed, 'failed run')}: tried again, up to max_attempts={most} times"
        )
    if refused := sum(bool(cell.refused) for cell in status.cells):
        words = shlex.join(study_words(status.root))
        lines.append(
            f"{format_count(refused, 'refused cell')}: not trained unless the cause is corrected; "
            f"python -m normexp.status {words} forget=REFUSED drops them"
        )
    return lines
