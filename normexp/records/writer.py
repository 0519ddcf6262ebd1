"""Writing so that a reader sees a whole file or none, whenever the writer dies."""

from __future__ import annotations

import errno
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from normexp.errors import UserError
from normexp.records.layout import CONFIG_FILE, EVALUATION_FILE, RESULT_FILE
from normexp.records.result import Result


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends well, synced to disk.

    On an exception `path` is as it was and nothing is left beside it. A killed process may leave
    its temporary file: `remove_leftovers`. For weights: `torch.save(state, file)`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically, in UTF-8."""
    with open_atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces `path` atomically; ValueError for a number that is not finite (JSON has none)."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def append_whole(descriptor: int, content: bytes) -> None:
    """Appends all of `content`, synced to disk; after an OSError (a full disk) none of it.

    The file is open with O_APPEND, and nobody else appends meanwhile.
    """
    end = os.fstat(descriptor).st_size
    rest = memoryview(content)
    try:
        while rest:  # one round, but for a disk that fills up: its next write says why
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, end)
        raise
    os.fsync(descriptor)


def write_result(seed_dir: Path, result: Result) -> None:
    """result.json, the last file of a run: its presence means ended."""
    write_json(seed_dir / RESULT_FILE, result.to_dict())


def write_evaluation(seed_dir: Path, content: Mapping[str, Any]) -> None:
    """evaluation.json: metrics by statistics, {"precise": {"test/accuracy": 0.9, ...}, ...}."""
    write_json(seed_dir / EVALUATION_FILE, content)


def write_config(cell_dir: Path, config: str) -> None:
    """config.yaml of a cell, as the caller's YAML text."""
    write_text(cell_dir / CONFIG_FILE, config)


def remove_leftovers(directory: Path) -> None:
    """Removes temporary files of killed writers; only for the one who may write there now."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def ensure_writable(directory: Path, *, key: str = "runs_dir") -> None:
    """Refuses a directory in which nothing can be written, before any work; creates nothing.

    Where it does not exist, its nearest existing parent is tried.
    """
    existing = directory.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        tempfile.TemporaryFile(dir=existing).close()  # without a name that others would meet
    except OSError as error:
        raise UserError(
            f"{key}={directory} cannot be written ({error.strerror}: {existing}); "
            f"try another folder with {key}=..."
        ) from error


@contextmanager
def refusing_denied(path: Path, remedy: str) -> Iterator[None]:
    """Turns a file or folder that may not be read or written into a UserError of one line."""
    try:
        yield
    except OSError as error:
        if not is_denied(error):
            raise
        reason = os.strerror(error.errno or errno.EACCES)
        raise UserError(f"{error.filename or path}: {reason}; {remedy}") from error


def is_denied(error: OSError) -> bool:
    """Whether an error is for lack of permission, or of a file system that is read-only."""
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def _sync_directory(directory: Path) -> None:
    """Makes a rename last through a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
