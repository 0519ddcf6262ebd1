"""study.jsonl: the commands and cells of a study, one JSON object per line, append-only.

Results do not depend on this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.files import append_lines, open_append, read_lines, refusing_denied
from normexp.records.paths import STUDY_FILE


@dataclass(frozen=True)
class CommandEntry:
    """One command that was run for a study.

    Attributes:
        command: the words that were typed, program first.
        grid: the values that the command spans, by key.
        cells: the seeds asked for, by the digest of the cell.
    """

    time: str
    command: list[str]
    grid: Mapping[str, Any]
    code_version: str
    cells: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class CellEntry:
    """One line about a cell: a request for it, its id, or why it cannot be trained.

    The latest line counts: a request opens a cell again that could not be trained.
    """

    digest: str
    title: str
    seeds: Sequence[int]
    cell_id: str = ""
    error: str = ""


@dataclass(frozen=True)
class SearchEntry:
    """The cells that a search has tried, for its tuning curve.

    Attributes:
        words: the overrides that all points share, as typed.
        keys: the keys that were searched.
        metric: the name of the validation metric that points are compared by.
        points: the ids of the cells.
    """

    title: str
    words: Sequence[str]
    keys: Sequence[str]
    metric: str
    points: Sequence[str]


@dataclass(frozen=True)
class KeyEntry:
    """What a recorded cell followed from, see `cells.recorded`.

    Attributes:
        digest: of the cell, as in `CellEntry`.
        key: a digest of everything that the results follow from.
        sources: the user's own files and packages that are part of the key.
        evaluated: what evaluation.json must hold, see `EvaluationPlan.kinds`.
    """

    digest: str
    key: str
    cell_id: str
    sources: Sequence[str]
    evaluated: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AttemptEntry:
    """A stack that failed to train.

    Attributes:
        stack: its id, see `StackRecord`.
        died: its process died; otherwise it raised.
        checkpointed_at: of the stack when that happened, see `StackRecord`.
    """

    time: str
    stack: str
    error: str
    died: bool
    checkpointed_at: int


@dataclass
class CellHistory:
    """All entries of one cell: the union of its seeds, and the latest of every other value.

    Attributes:
        earlier_ids: the ids that the cell had before its source or data changed.
    """

    title: str
    seeds: set[int] = field(default_factory=set)
    cell_id: str = ""
    error: str = ""
    earlier_ids: set[str] = field(default_factory=set)

    def add(self, entry: CellEntry) -> None:
        self.title = entry.title
        self.seeds |= set(entry.seeds)
        if entry.cell_id:
            self.earlier_ids = (self.earlier_ids | {self.cell_id}) - {entry.cell_id, ""}
            self.cell_id = entry.cell_id
        self.error = entry.error

    def has(self, entry: CellEntry) -> bool:
        """True if the entry says nothing new."""
        said = (self.cell_id, self.error)
        return set(entry.seeds) <= self.seeds and (entry.cell_id or said[0], entry.error) == said


@dataclass
class History:
    """The content of study.jsonl; commands and attempts are sorted by time, oldest first."""

    commands: list[CommandEntry] = field(default_factory=list)
    attempts: list[AttemptEntry] = field(default_factory=list)
    cells: dict[str, CellHistory] = field(default_factory=dict)  # by digest
    keys: dict[str, list[KeyEntry]] = field(default_factory=dict)  # by digest, oldest first
    searches: dict[str, SearchEntry] = field(default_factory=dict)  # the latest of each space

    def add(self, entry: NewEntry) -> None:
        if isinstance(entry, SearchEntry):  # a longer search replaces the shorter one
            self.searches[json.dumps([entry.words, entry.keys])] = entry
        elif isinstance(entry, KeyEntry):
            self.keys.setdefault(entry.digest, []).append(entry)
        else:
            self.cells.setdefault(entry.digest, CellHistory(entry.title)).add(entry)

    def has(self, entry: NewEntry) -> bool:
        """True if the entry says nothing new."""
        if isinstance(entry, SearchEntry):
            return entry in self.searches.values()
        if isinstance(entry, KeyEntry):
            return entry in self.keys.get(entry.digest, [])
        return entry.digest in self.cells and self.cells[entry.digest].has(entry)


NewEntry = CellEntry | SearchEntry | KeyEntry  # written only if they say something new
Entry = CommandEntry | AttemptEntry | NewEntry


def read_history(study_dir: Path) -> History:
    """Reads study.jsonl; an empty history without the file.

    Raises:
        UserError: the file cannot be read, or a line of it was edited by hand.
    """
    path = study_dir / STUDY_FILE
    history = History()
    with refusing_denied(path, "make it readable (results do not depend on it)"):
        lines = read_lines(path) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            entry = _parse(line)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{path} line {number} is not as normexp writes it; correct the line, or move the "
                "file away (results do not depend on it)"
            ) from error
        if isinstance(entry, CommandEntry):
            history.commands.append(entry)
        elif isinstance(entry, AttemptEntry):
            history.attempts.append(entry)
        else:
            history.add(entry)
    return history


def append_command(
    study_dir: Path,
    command: Sequence[str],
    grid: Mapping[str, Any],
    code_version: str,
    cells: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Appends a command with the current time; see `CommandEntry` for the arguments.

    Raises:
        ValueError: a value of the grid is not finite.
        TypeError: a value of the grid is not plain.
        OSError: the file could not be written, and is unchanged.
    """
    _append(study_dir, CommandEntry(_now(), list(command), grid, code_version, cells or {}))


def append_attempt(
    study_dir: Path, stack: str, error: str, *, died: bool, checkpointed_at: int
) -> None:
    """Appends a failure of a stack with the current time; see `AttemptEntry` for the arguments."""
    _append(study_dir, AttemptEntry(_now(), stack, error, died, checkpointed_at))


def _append(study_dir: Path, entry: CommandEntry | AttemptEntry) -> None:
    line = _line(entry)
    with open_append(study_dir / STUDY_FILE) as descriptor:
        append_lines(descriptor, [line])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def append_cells(study_dir: Path, entries: Iterable[NewEntry]) -> None:
    """Appends the entries that say something new. Needs no write access if none does."""
    entries = list(entries)
    history = read_history(study_dir)
    if all(history.has(entry) for entry in entries):
        return
    with open_append(study_dir / STUDY_FILE) as descriptor:
        history = read_history(study_dir)  # with the lock: others may have written meanwhile
        lines = []
        for entry in entries:
            if not history.has(entry):
                history.add(entry)
                lines.append(_line(entry))
        append_lines(descriptor, lines)


def _line(entry: Entry) -> str:
    return json.dumps(asdict(entry), allow_nan=False)


def _parse(line: str) -> Entry:
    """Raises TypeError or ValueError for a line that `_line` did not write."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise TypeError
    if isinstance(content.get("evaluated"), bool):  # as it once was; no such key is current
        del content["evaluated"]
    entry = next((kind for key, kind in _KINDS.items() if key in content), CellEntry)(**content)
    if any(not isinstance(getattr(entry, part.name), _TYPES[part.name]) for part in fields(entry)):
        raise TypeError
    return entry


_KINDS = {
    **{"command": CommandEntry, "stack": AttemptEntry, "points": SearchEntry, "key": KeyEntry},
    "digest": CellEntry,
}
_TYPES = {
    **dict.fromkeys(("time", "code_version", "digest", "title", "cell_id", "error", "stack"), str),
    **dict.fromkeys(("metric", "key"), str),
    **dict.fromkeys(("command", "seeds", "words", "keys", "points", "sources"), list),
    **dict.fromkeys(("grid", "cells", "evaluated"), dict),
    **{"died": bool, "checkpointed_at": int},
}
