"""A Ctrl-C that waits for a checkpoint. No torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Interrupted(Exception):
    """Training was asked to stop and left a checkpoint."""


class StopRequest:
    """Whether the user asked to stop; a second Ctrl-C stops at once.

    `requested` may also be set from another thread, by one who asks in the user's place.
    """

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGINT and SIGTERM as requests while inside; only a main thread can."""
        try:
            previous = {
                number: signal.signal(number, self._request)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        except ValueError:  # not the main thread: signals go elsewhere
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def keep_listening(self) -> None:
        """Inside `listening`: takes the signals back from whoever has taken them since."""
        with suppress(ValueError):  # as above
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._request)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
