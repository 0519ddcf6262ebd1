"""The id of a cell as text, and where a user's own source begins.

An id is a readable slug and a hash of the training's canonical config. The hash leaves out shipped
keys at their defaults and names a shipped class by its choice, so a new key or a moved class does
not change the ids of existing runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_LENGTH = 80  # characters of a cell id: readable in a listing, short enough for any file system
HASH_DIGITS = 10
NAME_LENGTH = 16
# Of the questions in checks/ whose answers a study keeps. Raised when a question may answer
# otherwise for the same norm, so that kept answers are measured again.
QUESTIONS_VERSION = 2


def canonical_sizes(
    batch: int, micro: int | None, norm: int | None, *, mixes_samples: bool
) -> dict[str, int | None]:
    """The three sizes in canonical form: None if equal to the next larger one.

    `norm_batch_size` is also None for a norm that does not mix samples, measured by the caller.
    """
    micro = None if micro is None or micro >= batch else micro
    norm = None if norm is None or norm >= (micro or batch) else norm
    return {
        "batch_size": batch,
        "micro_batch_size": micro,
        "norm_batch_size": norm if mixes_samples else None,
    }


def differences(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` that differ from `defaults`, in nested dicts; `~key: None` for a removed key.

    Numbers are compared by value (1 is 1.0), and a list as a whole.
    """
    differing: dict[str, Any] = {f"~{key}": None for key in defaults if key not in values}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := differences(value, default):
                differing[key] = inner
        elif key not in defaults or _plain(value) != _plain(default):
            differing[key] = value
    return differing


def cell_id(content: Mapping[str, Any], slug: Sequence[str]) -> str:
    """`group-convnet-digits-b32-m8-n4-lr0.1-0123456789`: a slug and a hash of `content`.

    The hash is of JSON with sorted keys and numbers by value (0.10 is 0.1, 1.0 is 1). Lower case,
    safe as a file name, at most 80 characters.
    """
    text = json.dumps(_plain(content), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
    name = "-".join(map(_safe, slug))[: MAX_LENGTH - HASH_DIGITS - 1].rstrip("-._")
    return f"{name}-{digest}" if name else digest


def source_line_of(error: Exception) -> str:
    """`" (file.py, line 3)"`, the line of the user's own code that raised; empty if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if source_root(Path(frame.filename)) is not None]
    return (
        f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})"
        if user_frames
        else ""
    )


def source_root(module_file: Path) -> Path | None:
    """The user's own file, or the outermost package that holds it, helpers included.

    None for a file of normexp or in site-packages.
    """
    path = module_file.resolve()
    if path.is_relative_to(Path(__file__).resolve().parents[1]) or is_installed(path):
        return None
    while (path.parent / "__init__.py").is_file():
        path = path.parent
    return path


def digest_of_package(folder: Path) -> str:
    """16 hex digits of sha256 of the names and bytes of the Python files below a folder."""
    sha = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        sha.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:16]


def is_installed(path: Path) -> bool:
    """True for a file in site-packages, where a version number stands for the source."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _plain(value: Any) -> Any:
    """Dicts with string keys, lists, and numbers of 15 digits: one value has one JSON text.

    The sixteenth digit of a derived number, such as a momentum, may differ between machines.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        value = float(f"{value:.15g}")
        return int(value) if value.is_integer() else value
    return value


def _safe(name: str) -> str:
    safe = re.sub(r"[^a-z0-9_.]+", "_", name.lower())[:NAME_LENGTH].strip("_.")
    return safe or "custom"
