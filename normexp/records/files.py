"""Files that survive the death of their writer: atomic writes, appended lines, locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from normexp.errors import UserError

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
LEAST_FREE = 64 * 1024  # bytes; with less, torch's write errors mean a full disk


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that replaces `path`, synced to disk, when the block succeeds.

    After an exception `path` is unchanged and no temporary file is left. A killed process may leave
    its temporary file, see `remove_leftovers`. For weights: `torch.save(state, file)`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(NotADirectoryError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # which messages name
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the rename survives a power cut
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path) -> None:
    """Removes the temporary files of killed writers. The caller must hold the directory's lock."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically, in UTF-8."""
    with open_atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces `path` atomically. Raises ValueError for a number that is not finite."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises UserError, with the file and the remedy, if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: the run has not ended; run it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); move it away") from error
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise UserError(
            f"{path} is not valid JSON ({error}); remove it, and run the same command again"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object, so normexp did not write it; move it away")
    return content


@contextmanager
def user_error_if_denied(path: Path, remedy: str) -> Iterator[None]:
    """Turns an error for lack of permission into a UserError of one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        reason = os.strerror(error.errno)
        raise UserError(f"{error.filename or path}: {reason}; {remedy}") from error


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


# --- Locks ----------------------------------------------------------------------------------------


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Holds an exclusive lock by `flock` inside the block (Linux and macOS, not Windows).

    Yields False, without waiting, if another holder has the lock. The kernel releases the lock when
    its holder dies, so the file of a killed process locks nothing. A forked child shares the lock,
    a spawned one does not. The file holds the holder's process id, and goes at the end.

    Raises:
        UserError: the file cannot be written, or its file system knows no locks.
    """
    descriptor = _open_locked(path, waits=False)
    try:
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        yield descriptor is not None
    finally:
        if descriptor is not None:
            if _is_at(path, descriptor):
                path.unlink()
            os.close(descriptor)


def holder_of(path: Path) -> int | None:
    """The process that holds a lock at this moment; None if none does. Creates nothing."""
    try:
        with open(path) as file:
            if _lock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB):
                return None
            return int(file.read() or 0)
    except (FileNotFoundError, ValueError):
        return None


def _open_locked(path: Path, *, waits: bool) -> int | None:
    """The descriptor of a file that is there and locked; None if another process has the lock."""
    while True:
        with user_error_if_denied(path, "make it readable and writable"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        is_locked = _lock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        if is_locked and _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)
        if not is_locked:
            return None  # else its last holder removed the file, so this lock has no effect


def _is_at(path: Path, descriptor: int) -> bool:
    """True if the file at the path is the one that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        raise UserError(
            f"runs_dir is on a file system without flock ({error.strerror}), so two commands could "
            "train the same run; take a local folder with runs_dir=..."
        ) from error
    return True


# --- Appended lines -------------------------------------------------------------------------------


@contextmanager
def appending(path: Path) -> Iterator[list[str]]:
    """Yields a list; its lines are appended to the file, synced to disk, when the block succeeds.

    Other writers wait meanwhile. A last line that a killed writer left incomplete is removed. After
    an OSError, such as a full disk, none of the lines is written.
    """
    descriptor = _open_locked(path, waits=True)
    assert descriptor is not None
    try:
        end = os.fstat(descriptor).st_size
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            end = os.pread(descriptor, end, 0).rfind(b"\n") + 1
            os.ftruncate(descriptor, end)
        lines: list[str] = []
        yield lines
        rest = memoryview("".join(f"{line}\n" for line in lines).encode())
        try:
            while rest:  # a write is short when the disk fills up; the next one raises
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, end)
            raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[str]:
    """Returns the complete lines of a file; a last line that is still being written is left out."""
    return path.read_bytes().decode(errors="replace").split("\n")[:-1]


# --- A full disk ----------------------------------------------------------------------------------


def full_disk_message(error: BaseException, directory: Path | None) -> str | None:
    """Returns the message for an error that was caused by a full disk, None for any other error."""
    where = f" below {directory}" if directory is not None else ""
    message = f"the disk is full{where}: free some space, then run the same command to continue"
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return message
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, RuntimeError) and directory is not None:
        existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
        return message if shutil.disk_usage(existing).free < LEAST_FREE else None
    return None
