"""Words of messages: values as typed, counts, durations, lists of names, suggestions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType
from typing import Any

SHOWN_NAMES = 3  # spelled out in a message


def as_typed(value: Any) -> str:
    """A value as typed: null, true, 3, [2,8], {a:1}, a text, "a text, quoted", my_file.MyClass."""
    if value is None:
        return "null"
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
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


def name_some(names: Iterable[str]) -> str:
    """`a, b, c and 6 more`: the first names, each once."""
    unique = list(dict.fromkeys(names))
    first = ", ".join(unique[:SHOWN_NAMES])
    num_more = len(unique) - SHOWN_NAMES
    return f"{first} and {num_more} more" if num_more > 0 else first


def suggest(word: str, known: Iterable[str], *, most: int = 1) -> str:
    """`did you mean a or b?` with the known words nearest to `word`; empty if none is near."""
    by_lower_case = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), list(by_lower_case), most, cutoff=0.5)
    near = [by_lower_case[name] for name in near]
    return f"did you mean {' or '.join(near)}?" if near else ""
