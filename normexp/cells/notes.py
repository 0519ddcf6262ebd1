"""What normexp's own modules note: on stderr, in a list, in a stack's log."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def collected_notes() -> Iterator[list[str]]:
    """The notes of normexp's modules while inside, as texts."""
    notes: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    package, handler = logging.getLogger("normexp"), Collector()
    package.addHandler(handler)
    try:
        yield notes
    finally:
        package.removeHandler(handler)


class Unheard(logging.Filter):
    """Passes each note once: cells and replicas of a command share most of them.

    Args:
        heard: what has been told already.
    """

    def __init__(self, heard: Iterable[str] = ()) -> None:
        super().__init__()
        self.heard = set(heard)

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self.heard
        self.heard.add(message)
        return is_new


@contextmanager
def notes_to_stderr(heard: Iterable[str] = ()) -> Iterator[None]:
    """normexp's own notes and warnings on stderr, one line each; without those `heard` before."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(Unheard(heard))
    package = logging.getLogger("normexp")
    package.addHandler(handler)
    level, propagate = package.level, package.propagate
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagate


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """The log of normexp's own modules into a file, appended, while inside."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("normexp")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        handler.close()
