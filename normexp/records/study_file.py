"""study.yaml: the commands of a study, one YAML document each, only ever appended to.

JSON is YAML, so each document is lines of `key: <JSON>`: no YAML library is needed to write or
read it, and any YAML library reads it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.layout import STUDY_FILE
from normexp.records.writer import append_whole, refusing_denied

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
