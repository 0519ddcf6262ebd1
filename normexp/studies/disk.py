"""A full disk is no cell's failure: nothing else can be trained either."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

LEAST_FREE = 64 * 1024  # bytes; below this torch's own errors on writing are for want of room


def full_disk(error: BaseException, directory: Path | None) -> str | None:
    """What to tell where an error came of a full disk, else None."""
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return _message(directory)
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, RuntimeError) and directory is not None and _free(directory) < LEAST_FREE:
        return _message(directory)
    return None


def _free(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _message(directory: Path | None) -> str:
    where = f" below {directory}" if directory is not None else ""
    return f"the disk is full{where}: make room and type the same line again, which goes on"
