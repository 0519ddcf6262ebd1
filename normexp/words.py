"""Words of messages: values as typed or in Python, counts, durations, names, suggestions."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType
from typing import Any

SHOWN_NAMES = 3  # spelled out in a message

# key=value of a message; a value is a [list], a "text", or goes on to a space or a sign.
WORD = re.compile(
    r"""(?<![\w./"'{+])([a-z_][\w.]*)=(\[[^]]*\]|"[^"]*"|[^\s,;:?()]+(?:,[^\s,;:?()]+)*)"""
)
FLAGS = {  # what takes a flag, for who types none
    "--config-dir FOLDER": 'normexp.run("--config-dir FOLDER ...")',
    "--help": "python -m normexp.train --help",
}


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


def as_python(message: str, *, own: str = "") -> str:
    """A message with the words of a command line as arguments: eps=null as eps=None.

    Dotted keys, which are no argument's name, stay words, in quotes: "norm.num_groups=6".

    Args:
        own: a group whose keys are arguments by their last name, as num_groups=6 of `norm`.
    """
    for flag, call in FLAGS.items():
        message = re.sub(rf"(?<!normexp.train ){flag}", call, message)

    def argument(word: re.Match[str]) -> str:
        name = word[1].removesuffix("._target_").removeprefix(f"{own}.")
        return json.dumps(word[0]) if "." in name else f"{name}={_literal(word[2])}"

    return WORD.sub(argument, message)


def _literal(value: str) -> str:
    """A value of a command line as Python; `...` stays."""
    if value.startswith("[") and value.endswith("]"):
        items = re.findall(r'\s*(?:"[^"]*"|[^,]+)', value[1:-1])  # a text may contain a comma
        return f"[{', '.join(_literal(item.strip()) for item in items)}]"
    if value in ("null", "true", "false"):
        return str(json.loads(value))
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return json.dumps(value, ensure_ascii=False)
    return value


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
