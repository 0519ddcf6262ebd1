"""study.jsonl: what was asked of a study and what came of it, one JSON object per line.

Only ever appended to. Results do not depend on this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any, get_origin, get_type_hints

from normexp.errors import UserError
from normexp.records.files import appending, read_lines, user_error_if_denied
from normexp.records.paths import STUDY_FILE


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class CommandEntry:
    """One command that was run for a study.

    Attributes:
        id: names the command in `EndEntry`; two that are typed alike have two.
        command: the words that were typed, program first.
        max_attempts: how often it tries a run that fails.
        cells: by cell id: the title and the seeds of each point of its grid that means this cell.
        rule: what the report of the study may call equal, as declared before there are results;
            see normexp.reporting.metric. Empty: not declared.
    """

    time: str = field(default_factory=_now, kw_only=True)
    id: str
    command: list[str]
    code_version: str
    max_attempts: int
    cells: dict[str, list[tuple[str, list[int]]]]
    rule: dict[str, Any] = field(default_factory=dict)

    def seeds_of(self, cell: str) -> set[int]:
        """The seeds that the command asks of a cell."""
        return {seed for _, seeds in self.cells.get(cell, []) for seed in seeds}


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
class EndEntry:
    """A cell that a command refused or failed to train, which it does not try again.

    Attributes:
        cell: its id.
        command: id of the command; a later command tries again.
        status: `refused` or `failed`.
    """

    cell: str
    title: str
    seeds: list[int]
    command: str
    status: str
    error: str


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

    @property
    def norm(self) -> str:
        """The norm that it is for; empty if no word names one."""
        words = (word.lstrip("+").partition("norm=") for word in self.words)
        return next((name for before, _, name in words if name and not before), "")


@dataclass(frozen=True)
class ForgetEntry:
    """What the study no longer asks for; a later command may ask again.

    Attributes:
        forgotten: ids of cells without a folder.
        commands: by id of a forgotten command, those of its cells that had ended runs by then. What
            it declared for them still holds, since their results may have been seen.
    """

    time: str = field(default_factory=_now, kw_only=True)
    forgotten: list[str]
    commands: dict[str, list[str]] = field(default_factory=dict)


Entry = CommandEntry | AttemptEntry | EndEntry | SearchEntry | ForgetEntry


@dataclass
class History:
    """The content of study.jsonl, in the order of its lines.

    Attributes:
        typed: all commands, also those that were forgotten; `commands` are the others.
        ends: with no seeds if they were forgotten.
        errors: why a cell cannot be trained; a later command that asks for it reopens it.
        forgotten: see `ForgetEntry.commands`; known before the first command is added.
        searches: the latest of each space.
    """

    typed: list[CommandEntry] = field(default_factory=list)
    attempts: list[AttemptEntry] = field(default_factory=list)
    ends: list[EndEntry] = field(default_factory=list)
    errors: dict[str, EndEntry] = field(default_factory=dict)
    forgotten: dict[str, list[str]] = field(default_factory=dict)
    searches: dict[str, SearchEntry] = field(default_factory=dict)

    @property
    def commands(self) -> list[CommandEntry]:
        return [command for command in self.typed if command.id not in self.forgotten]

    @property
    def declarations(self) -> list[tuple[CommandEntry, Collection[str]]]:
        """The commands by time, each with the cells whose seeds it declares.

        A forgotten command still does for those that had ended runs by then.
        """
        commands = sorted(self.typed, key=lambda entry: entry.time)
        return [(command, self.forgotten.get(command.id, command.cells)) for command in commands]

    def add(self, entry: Entry) -> None:
        match entry:
            case CommandEntry():
                self.typed.append(entry)
                if entry.id in self.forgotten:
                    return
                for cell in entry.cells:
                    if cell in self.errors and self.errors[cell].command != entry.id:
                        del self.errors[cell]
            case AttemptEntry():
                self.attempts.append(entry)
            case EndEntry():
                if entry.command in self.forgotten:
                    self.ends.append(replace(entry, seeds=[]))
                    return
                self.ends.append(entry)
                self.errors[entry.cell] = entry
            case ForgetEntry():
                for cell in entry.forgotten:
                    self.errors.pop(cell, None)
                    for command in self.commands:
                        command.cells.pop(cell, None)
                self.ends = [  # as many as before, since readers count them
                    replace(end, seeds=[]) if end.cell in entry.forgotten else end
                    for end in self.ends
                ]
            case SearchEntry():  # a longer search replaces the shorter one
                self.searches[json.dumps([entry.words, entry.keys])] = entry

    def asked_seeds(self, commands: Iterable[CommandEntry]) -> dict[str, set[int]]:
        """The seeds that commands ask for, by cell id."""
        asked: dict[str, set[int]] = {}
        for command in commands:
            for cell in command.cells:
                asked.setdefault(cell, set()).update(command.seeds_of(cell))
        return asked

    def declared_seeds(self, cell: str) -> set[int]:
        """The seeds in the first command for a cell."""
        for command, cells in self.declarations:
            if cell in cells and (seeds := command.seeds_of(cell)):
                return seeds
        return set()


def words_on_added_seeds(study_dir: Path, wanted: Mapping[str, Collection[int]]) -> str:
    """That a command adds seeds to cells of a study, and what to type instead; empty if none.

    The new study gets new seeds, as the results of the present ones made its author want more.

    Args:
        wanted: by cell id, the seeds that the command asks for.
    """
    history = read_history(study_dir)
    known = {cell: history.declared_seeds(cell) for cell in wanted}
    added = [cell for cell, seeds in known.items() if seeds and not seeds.issuperset(wanted[cell])]
    if not added or study_dir.name.endswith("-search"):  # nothing is claimed of a search
        return ""
    seen = set().union(*history.asked_seeds(history.typed).values())
    num_seeds = max(len(known[cell].union(wanted[cell])) for cell in added)
    base = re.sub(r"-\d+$", "", study_dir.name)
    names = (f"{base}-{number}" for number in count(2))
    name = next(name for name in names if not study_dir.with_name(name).exists())
    of_cells = f"{len(added)} cells" if len(added) > 1 else "a cell"
    return (
        f"study={study_dir.name}: seeds are added to the declared ones of {of_cells}, so the "
        f"report will give no verdict on them; for verdicts, train a new study: study={name} "
        f"seed={max(seen) + 1} replicas={num_seeds}"
    )


def read_history(study_dir: Path) -> History:
    """Reads study.jsonl; an empty history without the file.

    Raises:
        UserError: the file cannot be read, or a line of it was edited by hand.
    """
    path = study_dir / STUDY_FILE
    history = History()
    with user_error_if_denied(path, "make it readable (results do not depend on it)"):
        lines = read_lines(path) if path.exists() else []
    entries = list[Entry]()
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_parse(line))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{path} line {number} was not written by normexp; correct the line, or move the "
                "file away (results do not depend on it)"
            ) from error
    for entry in entries:
        if isinstance(entry, ForgetEntry):
            history.forgotten |= entry.commands
    for entry in entries:
        history.add(entry)
    return history


def append_entries(study_dir: Path, entries: Iterable[Entry]) -> None:
    """Appends entries.

    Raises:
        OSError: the file could not be written, and is unchanged.
    """
    with appending(study_dir / STUDY_FILE) as lines:
        lines += [json.dumps(asdict(entry), allow_nan=False) for entry in entries]


# The key by which each kind of line is known.
_KINDS = {
    **{"max_attempts": CommandEntry, "stack": AttemptEntry},
    **{"points": SearchEntry, "status": EndEntry},
    "forgotten": ForgetEntry,
}


def _parse(line: str) -> Entry:
    """Raises TypeError or ValueError for a line that `append_entries` did not write."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise TypeError
    kind = next((kind for key, kind in _KINDS.items() if key in content), None)
    if kind is None:
        raise TypeError
    entry = kind(**content)
    if not all(isinstance(getattr(entry, name), type_) for name, type_ in _types_of(kind).items()):
        raise TypeError
    return entry


@cache
def _types_of(kind: type[Entry]) -> dict[str, Any]:
    hints = get_type_hints(kind).items()
    return {n: h if isinstance(h, UnionType) else get_origin(h) or h for n, h in hints}
