"""Files that survive the death of their writer: atomic writes, and locks."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from normexp.errors import UserError

FULL_DISK = "the disk is full: free some space, then run the same command to continue"


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that replaces `path`, synced to disk, when the block succeeds.

    After an exception `path` is unchanged and no temporary file is left; a killed process may leave
    one, which the next writer replaces. For weights: `torch.save(state, file)`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # which messages name
        if temporary.exists():
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically, in UTF-8."""
    with open_atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces `path` atomically. Raises ValueError for a number that is not finite."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        missing: returned if there is no file, which another process may just have removed.

    Raises:
        UserError: names the file and the remedy.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise UserError(f"{path} does not exist: the run has not ended; run it again") from error
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); move it away, and run the same command again"
        ) from error


def ensure_writable(directory: Path) -> None:
    """Raises UserError if nothing can be written to a directory, or to its nearest parent."""
    existing = directory.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        tempfile.TemporaryFile(dir=existing).close()  # has no name that others could see
    except OSError as error:
        raise UserError(
            f"runs_dir={directory} cannot be written ({error.strerror}: {existing}); "
            "try another folder with runs_dir=..."
        ) from error


def is_full_disk(error: BaseException | None) -> bool:
    """True if an error was caused by a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


# --- Locks ----------------------------------------------------------------------------------------


@contextmanager
def file_lock(path: Path, *, waits: bool = False) -> Iterator[bool]:
    """Holds an exclusive lock inside the block.

    Yields False if another holder has the lock, unless it `waits`. The kernel releases the lock of
    a killed process. The file names its holder, see `this_command`, and goes at the end.
    """
    lock = FileLock(path, blocking=waits)
    try:
        lock.acquire()
    except (Timeout, FileNotFoundError):  # the folder has just been removed
        yield False
        return
    try:
        path.write_text(this_command())
        yield True
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def holder_of(path: Path) -> str:
    """What holds a lock at this moment, see `this_command`; empty if nothing does."""
    if not path.exists():
        return ""
    with file_lock(path) as is_free:
        return "" if is_free else path.read_text()


def other_holders(paths: Iterable[Path]) -> list[str]:
    """What holds these locks, except for this command and its workers."""
    holders = [holder_of(path) for path in paths]
    return [holder for holder in holders if holder not in ("", this_command())]


def this_command() -> str:
    """`process 12 (train norm=group)`: the command that this process, or its parent, belongs to."""
    parent = parent_process()  # of a worker
    process = os.getpid() if parent is None else parent.pid
    words = shlex.join([Path(sys.argv[0]).stem, *sys.argv[1:]])
    return f"process {process} ({textwrap.shorten(words, 120, placeholder=' ...')})"
