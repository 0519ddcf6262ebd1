"""What a sweep shows while it runs: a live view on a terminal, otherwise a line per cell."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from normexp.config.words import format_duration
from normexp.records.logs import messages_to
from normexp.records.result import Status
from normexp.records.study import CellState

SECONDS_BETWEEN_LINES = 60.0  # between progress lines without a terminal


class Display(logging.Handler):
    """Prints the cells that end, what trains now, and other lines, each once. Writes to stderr.

    Args:
        states: of the cells before anything trains.
    """

    def __init__(self, states: Sequence[CellState]) -> None:
        super().__init__()
        self.ended = {state.id for state in states if state.is_over}
        self.begun_with = sum(len(state.results) for state in states)
        self.printed: set[str] = set()
        self.began = self._line_at = time.monotonic()
        self.console = Console(stderr=True, highlight=False, emoji=False)
        self.live = Live(console=self.console, transient=True, auto_refresh=False)
        self._open = ExitStack()  # what the `with` block closes

    def __enter__(self) -> Display:
        self._open.enter_context(messages_to(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def emit(self, record: logging.LogRecord) -> None:
        self.print(record.getMessage())

    def print(self, text: str) -> None:
        """Prints a new line above the live view; of a progress bar only its last state."""
        if text not in self.printed:
            self.printed.add(text)
            self.console.print(text.rstrip("\r").rpartition("\r")[2], markup=False, soft_wrap=True)

    def update(self, states: Sequence[CellState]) -> None:
        """Prints the cells that have ended since the last call, and shows what trains."""
        done = sum(len(state.results) for state in states)
        total = sum(len(state.states) for state in states if not state.refused)
        for state in states:
            if state.is_over and state.id not in self.ended and len(states) > 1:
                reason = state.refused or "; ".join(state.failures)
                error = f": {reason}" if reason else ""
                self.print(f"[{done}/{total} runs] {state.status:<8} {state.title}{error}")
        self.ended |= {state.id for state in states if state.is_over}
        running = [state for state in states if Status.RUNNING in state.states.values()]
        stacks = {one.folder: (one, state.title) for state in running for one in state.stacks}
        elapsed = time.monotonic() - self.began
        head = f"{done}/{total} runs, {format_duration(elapsed)} elapsed"
        parts = sum(len(one.members) * one.step / max(one.total, 1) for one, _ in stacks.values())
        if trained := done - self.begun_with + parts:  # the mean time of a run so far
            left = format_duration(elapsed * (total - done - parts) / trained)
            head += f", {left} left"
        rows = [f"  {title}  step {one.step}/{one.total}" for one, title in stacks.values()]
        if self.console.is_terminal and rows:
            if not self.live.is_started:
                self._open.enter_context(self.live)
            texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in [head, *rows]]
            self.live.update(Group(*texts), refresh=True)
        elif rows and time.monotonic() - self._line_at > SECONDS_BETWEEN_LINES:
            self._line_at = time.monotonic()
            self.print(f"{head}: " + "; ".join(row.strip() for row in rows))
