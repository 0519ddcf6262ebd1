"""study.jsonl, the journal of a study: its commands, refusals and searches, a JSON object per line.

It is only ever appended to, and no result depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.training.records.files import write_text
from normexp.training.records.layout import (
    LOCK_FILE,
    STACKS,
    STUDY_FILE,
)
from normexp.training.records.locks import file_lock
from normexp.training.records.schema import SCHEMA, check_schema


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Request:
    """What a command asks of a cell.

    Attributes:
        words: norm, sizes and overrides.
        settings: the values that define the training as far as the command knows them, by dotted
            key; see `settings_of`.
        defaults: the settings that are left out there, because they have their defaults.
    """

    words: list[str]
    seeds: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return " ".join(self.words)

    @property
    def values(self) -> dict[str, Any]:
        """Every setting that the command knows, defaults included."""
        return self.defaults | self.settings


@dataclass(frozen=True)
class ConfirmRequest:
    """What a confirmation compares, by the ids of cells: the best tries with the baseline.

    Attributes:
        seeds: that no run of the study had before.
    """

    baseline: str
    finalists: list[str]
    seeds: list[int]

    @property
    def cells(self) -> list[str]:
        return [self.baseline, *self.finalists]


@dataclass(frozen=True)
class CommandEntry:
    """A command that trained something, or tried to.

    Attributes:
        command: the words that were typed, program first.
        cells: what the command asks of each cell, by id.
        searched: the keys whose values the command searches.
        confirms: of a command of normexp.confirm.
    """

    id: str
    command: list[str]
    code_version: str
    cells: dict[str, Request]
    searched: list[str] = field(default_factory=list)
    confirms: ConfirmRequest | None = None
    time: str = field(default_factory=_now)

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for lines that say the same."""
        return (self.id,)

    @property
    def num_runs(self) -> int:
        return sum(len(request.seeds) for request in self.cells.values())


@dataclass(frozen=True)
class Refusal:
    """A cell that cannot be trained; a later command tries again.

    Attributes:
        command: id of the command.
    """

    cell: str
    title: str
    seeds: list[int]
    command: str
    error: str
    time: str = field(default_factory=_now)

    @property
    def key(self) -> tuple[str, ...]:
        return (self.command, self.cell)


Entry = CommandEntry | Refusal


def append_entry(study_dir: Path, entry: Entry) -> None:
    """Appends a line, unless there is one with the same key; makes the study's folder."""
    study_dir.mkdir(parents=True, exist_ok=True)
    with file_lock(study_dir / LOCK_FILE, waits=True):
        if any(entry.key == earlier.key for earlier in read_entries(study_dir)):
            return
        path = study_dir / STUDY_FILE
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        write_text(path, before + entry_line(entry) + "\n")


def entry_line(entry: Entry) -> str:
    """A line of study.jsonl."""
    kind = "command" if isinstance(entry, CommandEntry) else "refusal"
    return json.dumps({"line": kind, "schema": SCHEMA} | asdict(entry))


def read_entries(study_dir: Path) -> tuple[Entry, ...]:
    """The lines of study.jsonl; empty without the file.

    Raises:
        UserError: a line was edited by hand.
    """
    path = study_dir / STUDY_FILE
    if not path.exists():
        return ()
    stat = path.stat()
    return _entries(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)  # a study is read every second while it is trained
def _entries(path: Path, _inode: int, _size: int, _written_at: int) -> tuple[Entry, ...]:
    return parse_entries(path.read_text(encoding="utf-8"), path)


def parse_entries(text: str, path: Path) -> tuple[Entry, ...]:
    """Parses the text of a study.jsonl. Raises UserError, naming the file and the line."""
    entries: list[Entry] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            content = json.loads(line)
            schema = content.pop("schema", 2 if "line" in content else SCHEMA)  # 2 wrote no number
            if schema == SCHEMA:
                entries.append(_parse_entry(content))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} line {number} was not written by normexp; correct the line, or move the "
                "file away (results do not depend on it)"
            ) from error
        check_schema(schema, path, path if path.suffix == ".zip" else path.parent)
    return tuple(entries)


def _parse_entry(content: dict[str, Any]) -> Entry:
    if content.pop("line") == "refusal":
        return Refusal(**content)
    requests = content["cells"].items()
    content["cells"] = {cell_id: Request(**request) for cell_id, request in requests}
    if content.get("confirms"):
        content["confirms"] = ConfirmRequest(**content["confirms"])
    return CommandEntry(**content)


def refused_by(study_dir: Path, command: str) -> dict[str, str]:
    """Why a command refused cells, by their ids."""
    return {
        entry.cell: entry.error
        for entry in read_entries(study_dir)
        if isinstance(entry, Refusal) and entry.command == command
    }


def remove_refused(study_dir: Path, command: str) -> None:
    """Removes a study that holds nothing but the refusals of one command."""
    if not study_dir.is_dir():
        return
    with suppress(OSError):
        (study_dir / STACKS).rmdir()
    with file_lock(study_dir / LOCK_FILE, waits=True):
        has_runs = not {path.name for path in study_dir.iterdir()} <= {STUDY_FILE, LOCK_FILE}
        num_refused, num_entries = len(refused_by(study_dir, command)), len(read_entries(study_dir))
        if not has_runs and num_refused == num_entries:
            (study_dir / STUDY_FILE).unlink(missing_ok=True)
    if not any(study_dir.iterdir()):
        study_dir.rmdir()


def confirmations_of(entries: Iterable[Entry]) -> list[ConfirmRequest]:
    """The confirmations of a study, each once, in the order in which they began."""
    found: list[ConfirmRequest] = []
    for entry in entries:
        if isinstance(entry, CommandEntry) and entry.confirms and entry.confirms not in found:
            found.append(entry.confirms)
    return found
