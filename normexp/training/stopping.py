"""Stop requests and progress of a training. Imports no torch: parents of workers use it too."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Together = Callable[[Any], AbstractContextManager[None]]


class Interrupted(Exception):
    """Training was asked to stop and has written a checkpoint."""


class StopRequest:
    """A request to stop, by Ctrl-C or by a thread that sets `requested`.

    A second Ctrl-C stops at once.
    """

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block SIGINT and SIGTERM are requests; no effect outside the main thread."""
        try:
            previous = {number: signal.signal(number, self._request) for number in SIGNALS}
        except ValueError:  # not the main thread
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def keep_listening(self) -> None:
        """Inside `listening`, reinstalls the handlers if other code has replaced them."""
        with suppress(ValueError):  # not the main thread
            for number in SIGNALS:
                signal.signal(number, self._request)

    def stop_at_once(self, _number: int, _frame: FrameType | None) -> None:
        """A signal handler that raises KeyboardInterrupt.

        It is a request too, since foreign code may swallow the exception, as while it is imported.
        """
        self.requested = True
        raise KeyboardInterrupt

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass(frozen=True)
class TrainingControl:
    """Stops a training and follows its progress, from the caller's side.

    Attributes:
        stop: requests to stop, by Ctrl-C or by another thread.
        on_steps: called once a second while it trains; it shows the progress of the command, and
            starts and reads its worker processes where this process trains beside them.
        together: makes the other processes of the training, if there are any, train along inside
            its block; see `cells.devices.Ranks`.
    """

    stop: StopRequest = field(default_factory=StopRequest)
    on_steps: Callable[[], None] = lambda: None
    together: Together = nullcontext
