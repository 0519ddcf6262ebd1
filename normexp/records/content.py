"""Digests of the content of files, cached by path, size and modification time.

The cache is a file per folder below the user's cache directory. It is only a cache: unreadable or
unwritable, the digests are computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from normexp.records.files import write_text

SETTLED = 2.0  # seconds after its last change in which a file may change again unnoticed

# Of the files that a shipped image folder reads.
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
)

Entry = tuple[int, int, str]  # size, modification time in ns, digest


_digests_read: dict[tuple[Path, Callable[[Path], bool]], str | None] | None = None


@contextmanager
def reading_once() -> Iterator[None]:
    """Inside the block, the files below a path are looked at once, however many cells name them."""
    global _digests_read
    _digests_read = {}
    try:
        yield
    finally:
        _digests_read = None


def has_split_folders(root: Path) -> bool:
    """True if an image folder has train/ or test/; otherwise each of its folders is a class."""
    return any((root / split).is_dir() for split in ("train", "test"))


def _is_any(_: Path) -> bool:
    return True


def digest_of_path(path: Path, counts: Callable[[Path], bool] = _is_any) -> str | None:
    """16 hex digits of sha256: of a file's bytes, or of the names and bytes below a folder.

    Hidden files and folders do not count. None if there is no such file or folder.

    Args:
        counts: of a file, relative to the folder: whether it counts.
    """
    if _digests_read is None:
        return _read_digest(path, counts)
    key = path.resolve(), counts
    if key not in _digests_read:
        _digests_read[key] = _read_digest(path, counts)
    return _digests_read[key]


def _read_digest(path: Path, counts: Callable[[Path], bool]) -> str | None:
    root = path.resolve()
    if not root.exists():
        return None
    if root.is_file():
        names = [root.name]
        folder = root.parent
    else:
        folder = root
        names = [name for name in _names_below(root) if counts(Path(name))]
    digests = _digests(folder, names)
    if root.is_file():
        return digests.get(root.name)
    text = "".join(f"{name}\0{digests[name]}\0" for name in sorted(digests))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _names_below(root: Path) -> list[str]:
    names = []
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        place = Path(folder).relative_to(root)
        names += [(place / name).as_posix() for name in files if not name.startswith(".")]
    return names


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    """The digest of each file of a folder; without files that have just been removed."""
    cache_file = _cache_file(folder)
    cached, now = _read_cache(cache_file), time.time_ns()
    known: dict[str, Entry] = {}
    unknown: list[tuple[str, os.stat_result]] = []
    for name in names:
        with suppress(OSError):
            stat = (folder / name).stat()
            entry = cached.get(name)
            if entry is not None and tuple(entry[:2]) == (stat.st_size, stat.st_mtime_ns):
                known[name] = entry
            else:
                unknown.append((name, stat))
    digests = {name: entry[2] for name, entry in known.items()}
    if unknown:
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
            computed = pool.map(lambda item: _digest_of_file(folder / item[0]), unknown)
            for (name, stat), digest in zip(unknown, computed, strict=True):
                if digest is None:
                    continue
                digests[name] = digest
                if now - stat.st_mtime_ns > SETTLED * 1e9:
                    cached[name] = (stat.st_size, stat.st_mtime_ns, digest)
        with suppress(OSError):
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            write_text(cache_file, json.dumps(cached))
    return digests


def _digest_of_file(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return None


def _cache_file(folder: Path) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(base) / "normexp" / "digests" / f"{name}.json"


def _read_cache(file: Path) -> dict[str, Entry]:
    try:
        content = json.loads(file.read_text())
        return {
            str(name): (int(size), int(modified), str(digest))
            for name, (size, modified, digest) in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):  # missing or torn
        return {}
