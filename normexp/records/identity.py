"""The id of a cell, and digests of a user's own source and data.

An id is a readable slug and a hash of the training's canonical config. The hash leaves out shipped
keys at their defaults and names a shipped class by its choice, so a new key or a moved class does
not change the ids of existing runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MAX_LENGTH = 80  # characters of a cell id: readable in a listing, short enough for any file system
HASH_DIGITS = 10
NAME_LENGTH = 16
PYTHON_FOLDERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
DATA_PATHS = ("root", "path")  # keys of shipped data sets that name the user's own files
DATA_PACKAGES = ("scikit-learn", "babel")  # they hold data sets
# Of the questions in checks/ whose answers a study keeps. Raised when a question may answer
# otherwise for the same norm, so that kept answers are measured again.
QUESTIONS_VERSION = 2

# The user's own loaded modules: the spec, and the content of the file when it was first seen.
_seen: dict[str, tuple[object, bytes]] = {}


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
    found: dict[str, Any] = {f"~{key}": None for key in defaults if key not in values}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := differences(value, default):
                found[key] = inner
        elif key not in defaults or _plain(value) != _plain(default):
            found[key] = value
    return found


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
    own = [frame for frame in frames if source_root(Path(frame.filename)) is not None]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


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


def digest_of_source(path: Path, loaded: Mapping[Path, bytes] | None = None) -> str:
    """16 hex digits of sha256: of a file's bytes, or of names and bytes of a folder's **/*.py.

    Args:
        loaded: by file, the content to use instead of that on disk.
    """

    def content_of(file: Path) -> bytes:
        return loaded[file] if loaded and file in loaded else file.read_bytes()

    if path.is_file():
        return hashlib.sha256(content_of(path)).hexdigest()[:16]
    sha = hashlib.sha256()
    for file in sorted(path.rglob("*.py")):
        content = content_of(file)
        sha.update(f"{file.relative_to(path).as_posix()}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:16]


def loaded_sources() -> dict[str, str]:
    """The user's own files and packages that are loaded, and the digest of each as it was loaded.

    A file may be edited after its import, which does not change this process. So a digest is of
    the content from when the module was first seen. A reloaded module has a new spec, and is read
    again.
    """
    roots: set[Path] = set()
    contents: dict[Path, bytes] = {}
    for name, module in [*sys.modules.items()]:
        spec, file = (vars(module).get(key) for key in ("__spec__", "__file__"))
        if not isinstance(file, str) or file.startswith(PYTHON_FOLDERS):
            continue
        path = Path(file).resolve()
        root = source_root(path)
        if root is None or not path.is_file():
            continue
        if name not in _seen or _seen[name][0] is not spec:
            _seen[name] = spec, path.read_bytes()
        roots.add(root)
        contents[path] = _seen[name][1]
    return {str(root): digest_of_source(root, contents) for root in sorted(roots)}


def digest_of_data(data: Mapping[str, Any]) -> str | None:
    """Digest of the user's own files that a data set is read from.

    None for a user's own loader, and for folders behind links. Size and modification time stand for
    the content of a file: one that was only touched merely costs a preparation.
    """
    if not str(data["_target_"]).startswith("normexp."):
        return None
    sha = hashlib.sha256(f"{sys.version_info[:3]}{[*map(_version_of, DATA_PACKAGES)]}".encode())
    try:
        for root in (Path(data[key]) for key in DATA_PATHS if data.get(key) is not None):
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                if path != root and path.is_symlink() and path.is_dir():
                    return None  # rglob does not look behind it
                stat = path.stat()
                sha.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    except OSError:  # a file has just been removed
        return None
    return sha.hexdigest()[:16]


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def digest_with_weights(data_digest: str | None, model: Mapping[str, Any]) -> str | None:
    """Extends the digest of the data's files by the weights file that a model names, if any."""
    name = model.get("weights")
    if data_digest is None or name is None or not Path(name).is_file():
        return data_digest
    stat = Path(name).stat()
    return f"{data_digest} {stat.st_size} {stat.st_mtime_ns}"


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
