"""The status of a study on a terminal, and what to type to finish it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.studies.status import STATES, CellStatus, StudyStatus
from normexp.studies.titles import tell_apart

ENTRIES = {"normexp-train": "python -m normexp.train", "normexp-tune": "python -m normexp.tune"}


def print_status(status: StudyStatus) -> None:
    """One row per cell, then the commands so far, and the next one."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(_table(status))
    runs = status.runs
    counts = ", ".join(f"{runs[state]} {state}" for state in STATES if runs[state])
    refused = sum(bool(cell.refused) for cell in status.cells)
    more = f"; {refused} cells refused" if refused else ""
    lines = [
        f"{status.root}: {sum(runs.values())} runs of {len(status.cells)} cells: {counts}{more}"
    ]
    lines += ["commands so far:"] if status.commands else []
    lines += [f"  {command.get('time', '?')}  {_spoken(command)}" for command in status.commands]
    lines += _next(status)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(status: StudyStatus) -> Table:
    states = [state for state in STATES if status.runs[state]]
    shared, titles = _titles(status.cells)
    caption = Text(shared) if shared else None  # Text, as [...] in a title is no markup
    table = Table("cell", *states, "", box=None, caption=caption, caption_justify="left")
    for cell, title in zip(status.cells, titles, strict=True):
        counts = [str(cell.runs[state] or "-") for state in states]
        table.add_row(*map(Text, [title, *counts, _note(cell)]))
    return table


def _titles(cells: Sequence[CellStatus]) -> tuple[str, list[str]]:
    """What all cells share, and what each is beyond that."""
    named = [cell.title for cell in cells if cell.digests and not cell.refused]
    shared, apart = tell_apart(named)
    own = dict(zip(named, apart, strict=True))
    return f"all with {shared}" if shared else "", [
        own.get(cell.title, cell.title) for cell in cells
    ]


def _note(cell: CellStatus) -> str:
    return "; ".join([cell.refused] * bool(cell.refused) + cell.notes)


def _spoken(command: Mapping[str, Any]) -> str:
    typed: list[str] = list(command.get("command") or ["?"])
    entry, words = typed[0], typed[1:]
    return " ".join([ENTRIES.get(entry, entry), shlex.join(words)])


def _again(status: StudyStatus, command: Mapping[str, Any], *, tries: int | None = None) -> str:
    """A recorded line for where the study lies by now: it may have been moved or renamed.

    Args:
        tries: how often a run may fail, in the place of what was typed.
    """
    typed: list[str] = list(command.get("command") or ["?"])
    dropped = "study|runs_dir" if tries is None else "study|runs_dir|max_attempts|retry_failed"
    words = [word for word in typed if not re.match(rf"\+*({dropped})=", word)]
    name = status.name
    if typed[0] == "normexp-tune" and not any(re.match(r"study=.*-search$", w) for w in typed):
        name = name.removesuffix("-search")  # the study of the trials is called after the report's
    if name != "default" or any(word.startswith("experiment=") for word in typed):
        words.append(f"study={name}")
    if status.root.parent != Path("runs"):
        words.append(f"runs_dir={status.root.parent}")
    words += [] if tries is None else [f"max_attempts={tries}"]
    return _spoken({"command": words})


def _next(status: StudyStatus) -> list[str]:
    """What finishes the study, or what to do with a finished one."""
    place = "" if status.root.parent == Path("runs") else f" runs_dir={status.root.parent}"
    report = f"  python -m normexp.report study={status.name}{place}"
    if status.is_complete:
        return ["complete; next:", report]
    commands, told, tries = status.unfinished_commands(with_spent=False), "to finish", None
    if status.runs["running"]:
        told = "being trained now; should that stop"
    elif not commands and status.most_attempts:
        commands, tries = status.unfinished_commands(), status.most_attempts + 1
        told = "what failed was tried as often as max_attempts allows; to try once more"
    commands = commands or status.commands
    again = list(dict.fromkeys(_again(status, command, tries=tries) for command in commands))
    if not again:
        return ["incomplete, and study.yaml has no command to type again"]
    return [f"{told}, type again:", *(f"  {line}" for line in again)]
