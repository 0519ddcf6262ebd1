"""Where Optuna keeps its trials: a journal in the search's folder, one process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from normexp.errors import UserError
from normexp.records.files import FileLock, ensure_writable

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

JOURNAL = "optuna.journal"
SQLITE = "sqlite:///"


@contextmanager
def open_storage(setting: str | None, folder: Path) -> Iterator[BaseStorage]:
    """The storage of `tune.storage`, locked while inside; its folder is made where missing.

    A journal by default, as it needs no database and each entry is synced to disk.

    Args:
        setting: None, the path of a journal, or sqlite:///PATH.
        folder: of the search's study, for the default.

    Raises:
        UserError: another process searches there, or the file is no storage.
    """
    path = storage_path(setting, folder)
    ensure_writable(path.parent, key="runs_dir" if setting is None else "tune.storage")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    with lock as held:
        if not held:
            raise UserError(
                f"{path} is locked: process {lock.holder()} searches there; wait for it, "
                "or choose another study=..."
            )
        yield _open(path, is_sqlite=_is_sqlite(setting))


def storage_path(setting: str | None, folder: Path) -> Path:
    """The file of a storage."""
    if setting is None:
        return folder / JOURNAL
    if "://" in setting and not _is_sqlite(setting):
        raise UserError(f"tune.storage={setting}: give a file of a journal, or {SQLITE}FILE")
    return Path(setting.removeprefix(SQLITE))


def _is_sqlite(setting: str | None) -> bool:
    return setting is not None and setting.startswith(SQLITE)


def _open(path: Path, *, is_sqlite: bool) -> BaseStorage:
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        if is_sqlite:
            storage = RDBStorage(f"{SQLITE}{path}")
        else:
            _mend(path)
            held = _Held()  # its base class is not public
            journal = JournalFileBackend(str(path), lock_obj=held)  # type: ignore[arg-type]
            storage = JournalStorage(journal)
        storage.get_all_studies()
    except Exception as error:  # of JSON, SQL or an assertion, as the file may hold anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        remedy = "wait for it" if "locked" in reason else "move it away; no run is trained again"
        raise UserError(
            f"{path} cannot be used as Optuna's storage ({reason}); {remedy}"
        ) from error
    return storage


class _Held:
    """In place of Optuna's lock file, which a killed process would leave: ours is held already."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return


def _mend(path: Path) -> None:
    """Cuts off what a killed process left after the last line break. ValueError: no journal."""
    if not path.is_file() or not path.stat().st_size:
        return
    content = path.read_bytes()
    if not content.startswith(b"{"):  # Optuna itself would append to it
        raise ValueError("it holds no JSON")
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
