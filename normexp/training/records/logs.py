"""Sends the log messages of normexp's own modules to stderr, a list, or the log of a stack."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

PACKAGE = logging.getLogger("normexp")


class MessageList(logging.Handler):
    """Appends each message to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class NewMessages(logging.Filter):
    """Lets each message through once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self.seen
        self.seen.add(message)
        return is_new


@contextmanager
def messages_to(handler: logging.Handler, *, alone: bool = True) -> Iterator[None]:
    """Sends messages of level INFO and above to a handler; if `alone`, to none outside normexp."""
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
def collected_messages() -> Iterator[list[str]]:
    """Yields a list that receives every message logged inside the block."""
    handler = MessageList()
    with messages_to(handler, alone=False):
        yield handler.messages


@contextmanager
def messages_to_stderr() -> Iterator[None]:
    """Prints each message once, on a line of stderr."""
    handler = logging.StreamHandler()
    handler.addFilter(NewMessages())
    with messages_to(handler):
        yield


@contextmanager
def messages_to_file(path: Path) -> Iterator[None]:
    """Also appends messages to a file inside the block."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    with closing(handler), messages_to(handler, alone=False):
        yield
