"""Sends the log messages of normexp's own modules to stderr, a list, or the log of a stack."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

PACKAGE = logging.getLogger("normexp")


@contextmanager
def collected_messages() -> Iterator[list[str]]:
    """Yields a list that receives every message logged inside the block."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    with messages_to(handler, alone=False):
        yield messages


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
def messages_to_stderr() -> Iterator[None]:
    """Prints each message once, on a line of stderr."""
    known, handler = set[str](), logging.StreamHandler()
    handler.addFilter(lambda record: record.getMessage() not in known)
    handler.addFilter(lambda record: known.add(record.getMessage()) is None)
    with messages_to(handler):
        yield


@contextmanager
def messages_to_file(path: Path) -> Iterator[None]:
    """Also appends messages to a file inside the block."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    with closing(handler), messages_to(handler, alone=False):
        yield
