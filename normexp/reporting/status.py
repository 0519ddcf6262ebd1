"""What `normexp.status` prints of a study. Without torch."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.config.spec import tell_apart
from normexp.records.history import CommandEntry
from normexp.records.state import STATES, CellState, StudyStatus, is_search

ENTRIES = {"normexp-train": "python -m normexp.train", "normexp-tune": "python -m normexp.tune"}


def print_status(status: StudyStatus) -> None:
    """Prints a row per cell, the commands so far, and the command to type next."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(_table(status))
    runs = status.runs
    counts = ", ".join(f"{runs[state]} {state}" for state in STATES if runs[state])
    num_refused = sum(bool(cell.refused) for cell in status.cells)
    refused = f"; {num_refused} cells refused" if num_refused else ""
    lines = [
        f"{status.root}: {sum(runs.values())} runs of {len(status.cells)} cells: {counts}{refused}"
    ]
    lines += ["commands so far:"] if status.commands else []
    lines += [f"  {each.time}  {_as_typed(each.command)}" for each in status.commands]
    for line in [*lines, *_next(status)]:
        console.print(line, markup=False, soft_wrap=True)


def _table(status: StudyStatus) -> Table:
    states = [state for state in STATES if status.runs[state]]
    shared, titles = _titles(status.cells)
    caption = Text(f"all with {shared}") if shared else None  # Text: titles may hold brackets
    table = Table("cell", *states, "", box=None, caption=caption, caption_justify="left")
    for cell, title in zip(status.cells, titles, strict=True):
        count = Counter(cell.states.values())
        counts = [str(count[state] or "-") for state in states]
        note = "; ".join([*([cell.refused] if cell.refused else []), *cell.notes])
        table.add_row(*map(Text, [title, *counts, note]))
    return table


def _titles(cells: Sequence[CellState]) -> tuple[str, list[str]]:
    """Returns the words that all cells share, and the title of each cell without them."""
    named = [cell.title for cell in cells if cell.digests and not cell.refused]
    shared, apart = tell_apart(named)
    own = dict(zip(named, apart, strict=True))
    return shared, [own.get(cell.title, cell.title) for cell in cells]


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
    if name != "default" or any(word.startswith("experiment=") for word in typed):
        words.append(f"study={name}")
    if root.parent != Path("runs"):
        words.append(f"runs_dir={root.parent}")
    return _as_typed(words if max_attempts is None else [*words, f"max_attempts={max_attempts}"])


def _next(status: StudyStatus) -> list[str]:
    """The commands that finish the study, or that report on a finished one."""
    if status.is_complete:
        place = "" if status.root.parent == Path("runs") else f" runs_dir={status.root.parent}"
        return ["complete; next:", f"  python -m normexp.report study={status.root.name}{place}"]
    commands, purpose, tries = status.unfinished_commands(with_spent=False), "to finish", None
    most = max((n for cell in status.cells for n in cell.attempts.values()), default=0)
    if status.runs["running"]:
        purpose = "running now; if that stops"
    elif not commands and most:
        commands, tries = status.unfinished_commands(with_spent=True), most + 1
        purpose = "runs have failed as often as max_attempts allows; to try once more"
    again = [_again(status.root, each, max_attempts=tries) for each in commands or status.commands]
    if not again:
        return ["incomplete, and study.jsonl holds no command to type again"]
    return [f"{purpose}, type again:", *(f"  {line}" for line in dict.fromkeys(again))]
