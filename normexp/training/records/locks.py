"""Locks on files, which the kernel releases if their holder is killed."""

from __future__ import annotations

import errno
import getpass
import logging
import os
import platform
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path

from filelock import FileLock, Timeout

from normexp.training.records.files import fcntl

log = logging.getLogger(__name__)


@contextmanager
def file_lock(path: Path, *, waits: bool = False) -> Iterator[bool]:
    """Holds an exclusive lock inside the block.

    Yields False if another process has the lock, unless it `waits`. The kernel releases the lock of
    a killed process. The file names its holder, see `this_command`, and is removed at the end. (On
    Windows it is empty, since nobody could read it, and FileLock removes it.)
    """
    lock = FileLock(path, blocking=waits)
    left_by = _text_of(path)  # acquiring a lock empties its file
    try:
        lock.acquire()
    except (Timeout, FileNotFoundError):  # the folder has just been removed
        yield False
        return
    except NotImplementedError as error:  # the file system has no locks
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path)) from error
    except OSError as error:
        error.filename = str(path)  # flock's error names no file
        raise
    if ") on " in left_by and not left_by.endswith(_host()):
        log.warning(
            "%s was killed, or trains this study now: then the file system's locks do not cross "
            "machines; train a study on one machine at a time",
            left_by,
        )
    try:
        if fcntl is not None:
            path.write_text(this_command(), encoding="utf-8", errors="surrogateescape")
        yield True
    finally:
        if fcntl is not None:
            path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Waits for this user's other processes to leave such a block, so that one of them downloads.

    Args:
        what: names the file that they would download.
    """
    path = Path(tempfile.gettempdir(), f"normexp-{this_user()}-{what}")
    with file_lock(path, waits=True):
        yield


def this_user() -> str:
    """The number of this user; on Windows, which has none, the name."""
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _host() -> str:
    return f" on {platform.node()}"


def holder_of(path: Path) -> str:
    """The command that holds a lock now, see `this_command`; empty if none does, and on Windows.

    Writes nothing, so that it works in a read-only folder.
    """
    if fcntl is None:
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read()
    except OSError:  # no such lock, or no locks at all
        pass
    return ""


def other_holders(paths: Iterable[Path]) -> list[str]:
    """The commands that hold these locks, without this command and its workers."""
    holders = [holder_of(path) for path in paths]
    return [holder for holder in holders if holder not in ("", this_command())]


def this_command() -> str:
    """`process 12 (train norm=group) on node7`: the command that this process belongs to."""
    parent = parent_process()  # of a worker
    process = os.getpid() if parent is None else parent.pid
    words = shlex.join([Path(sys.argv[0]).stem, *sys.argv[1:]])
    return f"process {process} ({textwrap.shorten(words, 120, placeholder=' ...')}){_host()}"
