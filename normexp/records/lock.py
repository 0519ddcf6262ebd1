"""A lock that a dead process does not hold."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from normexp.records.writer import refusing_denied

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
