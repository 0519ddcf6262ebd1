"""Sends the log messages of normexp's own modules to stderr, a list, or the log of a stack."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path

PACKAGE = logging.getLogger("normexp")

_cell: ContextVar[str] = ContextVar("cell", default="")


@contextmanager
def messages_about(cell: str) -> Iterator[None]:
    """Messages logged inside the block are about a cell, see `CellFilter`."""
    token = _cell.set(cell)
    try:
        yield
    finally:
        _cell.reset(token)


class CellFilter(logging.Filter):
    """Notes the cell that a message is about, which may be "", as `record.cell`."""

    def filter(self, record: logging.LogRecord) -> bool:
        vars(record).setdefault("cell", _cell.get())
        return True


@contextmanager
def collected_messages() -> Iterator[list[str]]:
    """Yields a list that receives every message logged inside the block."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collector()
    PACKAGE.addHandler(handler)
    try:
        yield messages
    finally:
        PACKAGE.removeHandler(handler)


class OnceFilter(logging.Filter):
    """Passes each message once, because the cells and runs of a command repeat many.

    Args:
        known: messages that are not passed at all.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        super().__init__()
        self._known = set(known)

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._known
        self._known.add(message)
        return is_new


@contextmanager
def messages_to(handler: logging.Handler, *, alone: bool = True) -> Iterator[None]:
    """Sends messages from level INFO on to a handler; if `alone`, to none outside normexp."""
    level, propagate = PACKAGE.level, PACKAGE.propagate
    PACKAGE.addHandler(handler)
    PACKAGE.setLevel(logging.INFO)
    PACKAGE.propagate = propagate and not alone
    try:
        yield
    finally:
        PACKAGE.removeHandler(handler)
        PACKAGE.setLevel(level)
        PACKAGE.propagate = propagate


@contextmanager
def messages_to_stderr(known: Iterable[str] = ()) -> Iterator[None]:
    """Prints each message once, on a line of stderr, except for those that are `known`."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(OnceFilter(known))
    with messages_to(handler):
        yield


@contextmanager
def messages_to_file(path: Path) -> Iterator[None]:
    """Also appends messages to a file inside the block."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    with closing(handler), messages_to(handler, alone=False):
        yield
