"""study.yaml: the commands of a study, one YAML document each, only ever appended to.

JSON is YAML, so each document is lines of `key: <JSON>`: no YAML library is needed to write or
read it, and any YAML library reads it.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.files import append_whole, refusing_denied
from normexp.records.paths import INDEX_FILE, STUDY_FILE

START = "---\n"


def append_command(
    study_dir: Path,
    command: Sequence[str],
    grid: Mapping[str, Any],
    code_version: str,
    cells: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Adds one document to study.yaml; safe while other processes add theirs.

    Args:
        cells: the seeds that are asked for of each cell, by its digest in cells.csv.

    Raises:
        ValueError: a value of the grid is not plain, or not finite.
        OSError: nothing was written; the file is as before.
    """
    document = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "grid": grid,
        "code_version": code_version,
        **({} if cells is None else {"cells": cells}),
    }
    lines = [f"{key}: {_encode(value)}\n" for key, value in document.items()]
    content = (START + "".join(lines)).encode()
    descriptor = os.open(study_dir / STUDY_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until close
        _cut_torn_line(descriptor)
        append_whole(descriptor, content)
    finally:
        os.close(descriptor)


def read_commands(study_dir: Path) -> list[dict[str, Any]]:
    """The documents of study.yaml, oldest first; none where there is no such file.

    Raises:
        UserError: the file may not be read, or was edited by hand into something else.
    """
    path = study_dir / STUDY_FILE
    documents: list[dict[str, Any]] = []
    with refusing_denied(path, "make it readable (the results do not depend on it)"):
        content = path.read_bytes() if path.exists() else b""
    lines = content.split(b"\n")[:-1]  # without a torn last line
    for number, line in enumerate(lines, start=1):
        try:
            if line == START.strip().encode():
                documents.append({})
            else:
                key, text = line.decode().split(": ", maxsplit=1)
                value = json.loads(text)
                _check(key, value)
                documents[-1][key] = value
        except (ValueError, IndexError) as error:
            raise UserError(
                f"{path} line {number} is not as normexp writes it; mend the line, or move "
                "the file away (the results do not depend on it)"
            ) from error
    return documents


def _check(key: str, value: Any) -> None:
    """ValueError for a value that is not of its key's kind."""
    if key == "command":
        is_ours = _is_list_of(value, str)
    elif key == "cells":
        is_ours = isinstance(value, dict) and all(_is_list_of(v, int) for v in value.values())
    else:
        is_ours = key not in ("time", "code_version") or isinstance(value, str)
    if not is_ours:
        raise ValueError(f"{key} of another kind")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _cut_torn_line(descriptor: int) -> None:
    """Removes what a killed writer left after the last line break."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.ftruncate(descriptor, end)


def _encode(value: Any) -> str:
    """JSON that YAML 1.1 reads the same way: floats have a dot, strings are printable."""
    if isinstance(value, Mapping):
        items = [f"{_encode(str(key))}: {_encode(item)}" for key, item in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_encode(item) for item in value) + "]"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        mantissa, _, exponent = repr(value).partition("e")
        dotted = mantissa if "." in mantissa else f"{mantissa}.0"
        return f"{dotted}e{exponent}" if exponent else dotted
    if value is None or isinstance(value, str | int):
        return _escape(json.dumps(value, ensure_ascii=False))
    raise ValueError(f"{value!r} is not a plain value")


def _escape(text: str) -> str:
    """Printable ASCII and the astral planes as they are (JSON would write a surrogate pair)."""
    return "".join(c if " " <= c <= "~" or c > "\uffff" else f"\\u{ord(c):04x}" for c in text)


FIELDS = ("digest", "title", "seeds", "cell_id", "error")


@dataclass(frozen=True)
class News:
    """One line: that a cell is asked for, what its id is, or why it cannot be trained."""

    digest: str
    title: str
    seeds: Sequence[int]
    cell_id: str = ""
    error: str = ""


@dataclass
class Asked:
    """All that the lines say of one cell; the latest counts, and seeds add up.

    Attributes:
        earlier_ids: those it had before its source or data changed.
    """

    title: str
    seeds: set[int] = field(default_factory=set)
    cell_id: str = ""
    error: str = ""
    earlier_ids: set[str] = field(default_factory=set)

    def hear(self, news: News) -> None:
        self.title = news.title
        self.seeds |= set(news.seeds)
        if news.cell_id or news.error:
            if news.cell_id:
                self.earlier_ids = (self.earlier_ids | {self.cell_id}) - {news.cell_id, ""}
                self.cell_id = news.cell_id
            self.error = news.error

    def knows(self, news: News) -> bool:
        """Whether a line would say nothing new."""
        is_known = set(news.seeds) <= self.seeds
        if news.cell_id or news.error:
            is_known &= (news.cell_id or self.cell_id, news.error) == (self.cell_id, self.error)
        return is_known


def append_news(study_dir: Path, all_news: Iterable[News]) -> None:
    """Adds the lines that are new to cells.csv; safe while other processes add theirs."""
    all_news = list(all_news)
    cells = read_index(study_dir)
    if all(news.digest in cells and cells[news.digest].knows(news) for news in all_news):
        return  # so that a study that is only read need not be writable
    descriptor = os.open(study_dir / INDEX_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until close
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        whole = content[: content.rfind(b"\n") + 1]  # a killed writer may have torn its last line
        if len(whole) < len(content):
            os.ftruncate(descriptor, len(whole))
        cells = _read(whole.decode(errors="replace"))
        new = []
        for news in all_news:
            asked = cells.setdefault(news.digest, Asked(news.title))
            if not asked.knows(news):
                asked.hear(news)
                new.append(_line(news))
        header = "" if whole else ",".join(FIELDS) + "\n"
        if new:
            append_whole(descriptor, (header + "".join(new)).encode())
    finally:
        os.close(descriptor)


def read_index(study_dir: Path) -> dict[str, Asked]:
    """The cells that were asked for, by digest, in the order of their first line."""
    path = study_dir / INDEX_FILE
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    return _read(text[: text.rfind("\n") + 1])


def _read(text: str) -> dict[str, Asked]:
    """Lines that are not as `_line` writes them are passed over: results do not depend on them."""
    cells: dict[str, Asked] = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) != len(FIELDS) or tuple(row) == FIELDS:
            continue
        digest, title, seeds, cell_id, error = row
        if seeds and not seeds.replace(" ", "").isdecimal():
            continue
        news = News(digest, title, [int(seed) for seed in seeds.split()], cell_id, error)
        cells.setdefault(digest, Asked(title)).hear(news)
    return cells


def _line(news: News) -> str:
    seeds = " ".join(map(str, sorted(news.seeds)))
    row = [news.digest, news.title, seeds, news.cell_id, news.error]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow([" ".join(value.split()) for value in row])
    return file.getvalue()
