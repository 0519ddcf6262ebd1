"""Files that survive the death of their writer, and errors of the file system."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from normexp.errors import UserError, one_line

# None on Windows, where a file that is open can be neither removed nor replaced.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
FULL_DISK = "the disk is full: free some space, then run the same command to continue"


def expand_path(text: str) -> str:
    """A path with `~`, `$NAME` and `${NAME}` filled in, also where the shell has left them.

    Raises:
        ValueError: a variable that is not set: the path would be a folder of that name.
    """
    for name in VARIABLE.finditer(text):
        if (name[1] or name[2]) not in os.environ:
            raise ValueError(f"{name[0]} is not set; export it, or type the path itself")
    return os.path.expanduser(os.path.expandvars(text))


def read_path(key: str, text: str) -> Path:
    """The path that a key names, see `expand_path`. Raises UserError."""
    try:
        return Path(expand_path(text))
    except ValueError as error:
        raise UserError(f"{key}={text}: {error}") from error


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that replaces `path`, synced to disk, when the block succeeds.

    Several processes may write at once; the last one wins. After an exception `path` is unchanged
    and no temporary file is left; a killed process may leave one, which the next writer removes.
    For weights: `torch.save(state, file)`.
    """
    for abandoned in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):
            _remove_abandoned(abandoned)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with _open_locked(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(temporary, path)  # while it is locked: nobody finds it abandoned
        if fcntl is None:
            os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # for the message
        if temporary.exists():
            temporary.unlink()
        raise


def _remove_abandoned(path: Path) -> None:
    """Removes a temporary file. Raises OSError while its writer lives."""
    if fcntl is None:
        path.unlink()
        return
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _open_locked(path: Path) -> BinaryIO:
    """Creates a file, and locks it for as long as it is open, if the file system has locks."""
    while True:
        file = open(path, "wb")  # noqa: SIM115 (the caller closes it)
        if fcntl is None:
            return file
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # another writer may have found it before it was locked
            return file
        file.close()


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


def ensure_writable(directory: Path, key: str = "runs_dir") -> None:
    """Raises UserError if nothing can be written and locked in a directory, or its nearest parent.

    Args:
        key: of the config, which names the directory or the folder around it.
    """
    existing = directory.absolute()
    fault = "cannot be written"
    try:
        while not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing) as file:  # has no name that others could see
            fault = "has no file locks"
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(
            f"{directory} {fault} ({error.strerror}: {existing}); name another folder with "
            f"{key}=..."
        ) from error


def is_read_only(directory: Path) -> bool:
    """True if this process may not write to a folder, so that there is nothing to tidy up."""
    return not os.access(directory, os.W_OK)


def is_full_disk(error: BaseException | None) -> bool:
    """True if an error was caused by a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


REMEDIES = {  # by the number of an OSError
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or name another place"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    errno.EROFS: "name another folder, as with runs_dir=... or data_dir=...",
    errno.ENAMETOOLONG: "give shorter names, as with study=... or runs_dir=...",
    errno.ENOTDIR: "a file is where a folder should be; move it away, or name another folder",
    errno.EISDIR: "name a file, or move the folder away",
    errno.ENOENT: "it has gone, or its folder has; check the path",
    errno.ENOLCK: "file locks do not work there; use a folder on a local disk",
    errno.EMFILE: "allow more open files with ulimit -n 4096",
}


def describe(error: OSError) -> str:
    """One line for an error of the file system: the path, what is wrong, and the remedy."""
    place = f"{error.filename}: " if error.filename is not None else ""
    fault = error.strerror or one_line(error)
    remedy = REMEDIES.get(error.errno or 0, "see to it, and run the same again")
    return f"{place}{fault}; {remedy}"
