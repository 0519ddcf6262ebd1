"""study.jsonl: the commands and cells of a study, one JSON object per line, append-only.

Results do not depend on this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import get_origin, get_type_hints

from normexp.errors import UserError
from normexp.records.files import appending, read_lines, user_error_if_denied
from normexp.records.paths import STUDY_FILE


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class CommandEntry:
    """One command that was run for a study.

    Attributes:
        command: the words that were typed, program first.
        cells: the seeds asked for, by the digest of the cell.
    """

    time: str = field(default_factory=_now, kw_only=True)
    command: list[str]
    code_version: str
    cells: dict[str, list[int]]


@dataclass(frozen=True)
class AttemptEntry:
    """A stack that failed to train.

    Attributes:
        stack: its id, see `StackRecord`.
        died: its process died; otherwise it raised.
        checkpointed_at: of the stack when that happened, see `StackRecord`.
    """

    time: str = field(default_factory=_now, kw_only=True)
    stack: str
    error: str
    died: bool
    checkpointed_at: int


@dataclass(frozen=True)
class CellEntry:
    """One line about a cell: a request for it, its id, or why it cannot be trained.

    The latest line counts: a new request reopens a cell that could not be trained.
    """

    digest: str
    title: str
    seeds: list[int]
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
    words: list[str]
    keys: list[str]
    metric: str
    points: list[str]


@dataclass(frozen=True)
class CacheEntry:
    """The cache key of a recorded cell, see `cells.recorded`.

    Attributes:
        digest: of the cell, as in `CellEntry`.
        key: a digest of everything that the results follow from.
        sources: the user's own files and packages that are part of the key.
        evaluated: what evaluation.json must hold, see `EvaluationPlan.kinds`.
    """

    digest: str
    key: str
    cell_id: str
    sources: list[str]
    evaluated: dict[str, int] = field(default_factory=dict)


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
        is_same = entry.cell_id in ("", self.cell_id) and entry.error == self.error
        return is_same and set(entry.seeds) <= self.seeds


Entry = CommandEntry | AttemptEntry | CellEntry | SearchEntry | CacheEntry


@dataclass
class History:
    """The content of study.jsonl; commands and attempts are sorted by time, oldest first."""

    commands: list[CommandEntry] = field(default_factory=list)
    attempts: list[AttemptEntry] = field(default_factory=list)
    cells: dict[str, CellHistory] = field(default_factory=dict)  # by digest
    cache: dict[str, list[CacheEntry]] = field(default_factory=dict)  # by digest, oldest first
    searches: dict[str, SearchEntry] = field(default_factory=dict)  # the latest of each space

    def add(self, entry: Entry) -> None:
        match entry:
            case CommandEntry():
                self.commands.append(entry)
            case AttemptEntry():
                self.attempts.append(entry)
            case SearchEntry():  # a longer search replaces the shorter one
                self.searches[json.dumps([entry.words, entry.keys])] = entry
            case CacheEntry():
                self.cache.setdefault(entry.digest, []).append(entry)
            case CellEntry():
                self.cells.setdefault(entry.digest, CellHistory(entry.title)).add(entry)

    def has(self, entry: Entry) -> bool:
        """True if the entry says nothing new; commands and attempts always do."""
        match entry:
            case SearchEntry():
                return entry in self.searches.values()
            case CacheEntry():
                return entry in self.cache.get(entry.digest, [])
            case CellEntry():
                return entry.digest in self.cells and self.cells[entry.digest].has(entry)
        return False


def read_history(study_dir: Path) -> History:
    """Reads study.jsonl; an empty history without the file.

    Raises:
        UserError: the file cannot be read, or a line of it was edited by hand.
    """
    path = study_dir / STUDY_FILE
    history = History()
    with user_error_if_denied(path, "make it readable (results do not depend on it)"):
        lines = read_lines(path) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            history.add(_parse(line))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{path} line {number} was not written by normexp; correct the line, or move the "
                "file away (results do not depend on it)"
            ) from error
    return history


def append_entries(study_dir: Path, entries: Iterable[Entry]) -> None:
    """Appends the entries that say something new. Needs no write access if none does.

    Raises:
        OSError: the file could not be written, and is unchanged.
    """
    entries = list(entries)
    history = read_history(study_dir)
    if all(history.has(entry) for entry in entries):
        return
    with appending(study_dir / STUDY_FILE) as lines:
        history = read_history(study_dir)  # with the lock: others may have written meanwhile
        for entry in entries:
            if not history.has(entry):
                history.add(entry)
                lines.append(json.dumps(asdict(entry), allow_nan=False))


_KINDS = {"command": CommandEntry, "stack": AttemptEntry, "points": SearchEntry, "key": CacheEntry}


def _parse(line: str) -> Entry:
    """Raises TypeError or ValueError for a line that `append_entries` did not write."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise TypeError
    content.pop("grid", None)  # of commands, in earlier versions, as was a bool below
    if isinstance(content.get("evaluated"), bool):
        del content["evaluated"]
    kind = next((kind for key, kind in _KINDS.items() if key in content), CellEntry)
    entry = kind(**content)
    if not all(isinstance(getattr(entry, name), type_) for name, type_ in _types_of(kind).items()):
        raise TypeError
    return entry


@cache
def _types_of(kind: type[Entry]) -> dict[str, type]:
    return {name: get_origin(hint) or hint for name, hint in get_type_hints(kind).items()}
