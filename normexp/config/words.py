"""Words of messages: values as typed, counts, durations, the nearest known names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any


def as_typed(value: Any) -> str:
    """A value as typed: null, true, 3, [2,8], {a:1}, a text, "a text, quoted"."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{as_typed(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"[\w./ +-]+", value, re.ASCII):
        return json.dumps(value, ensure_ascii=False)  # Hydra could not read it
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_count(number: int, word: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def format_duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.{int(seconds < 1)}f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def suggest(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """`did you mean a or b?` with the known words nearest to `word`; empty if none is near."""
    near = get_close_matches(word, list(known), most, cutoff=0.5)
    return f"did you mean {join_or(near)}?" if near else ""


def join_or(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])


def one_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
