"""Writing so that a reader sees a whole file or none, whenever the writer dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from normexp.errors import UserError
from normexp.records.paths import CONFIG_FILE, EVALUATION_FILE


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


REMEDY = "it is the lock of a cell: make it readable and writable, or remove it if nothing runs"


class StackLock:
    """Exclusive use of a directory, by `flock` on a file in it (Linux and macOS, not Windows).

    The kernel drops the lock when its holder ends, however it ends, so a file left by a killed
    process holds nothing. It is tied to the open file: a child made by fork shares it, one made by
    spawn does not. The file has the holder's process id, for messages; `release` removes it.

        with StackLock(cell_dir / LOCK_FILE) as held:
            if not held: ...
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Takes the lock without waiting; False where somebody else holds it.

        Raises:
            UserError: the file may not be written.
        """
        assert self._descriptor is None, "this lock is already held"
        while True:
            with refusing_denied(self.path, REMEDY):
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            if self._is_current(descriptor):
                break
            os.close(descriptor)  # a lock on a file that its last holder removed excludes nobody
        self._descriptor = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except OSError:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Gives the lock back; nothing to do where it is not held."""
        if self._descriptor is None:
            return
        if self._is_current(self._descriptor):
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def holder(self) -> int | None:
        """The process id in the file, for a message; None where there is none."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def is_held(path: Path) -> bool:
    """Whether a process holds the lock at this moment; takes nothing and creates nothing.

    Who tries to acquire it in the very moment of the question is told that it is held. Raises
    UserError where the file may not be read.
    """
    try:
        with refusing_denied(path, REMEDY):
            descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
