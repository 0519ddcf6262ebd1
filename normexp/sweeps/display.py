"""What a sweep shows while it runs: a live view on a terminal, otherwise a line per cell."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from normexp.config.words import format_duration
from normexp.records.logs import about, messages_to
from normexp.records.result import Status
from normexp.records.study import CellState, StackState

SECONDS_BETWEEN_LINES = 60.0  # between progress lines without a terminal


class Display(logging.Handler):
    """Prints the cells that end, what trains now, and log messages, each once. Writes to stderr.

    Args:
        states: of the cells before anything trains.
    """

    def __init__(self, states: Sequence[CellState]) -> None:
        super().__init__()
        self.ended = {state.id for state in states if state.is_over}
        self.done = sum(len(state.results) for state in states)
        self.begun_with, self.is_single = self.done, len(states) == 1
        self.known: set[str] = set()  # messages
        self.began = self._line_at = time.monotonic()
        self.console = Console(stderr=True, highlight=False, emoji=False)
        self.live: Live | None = None
        self._open = ExitStack()  # what the `with` block closes

    def __enter__(self) -> Display:
        self._open.enter_context(messages_to(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()
        self.live = None

    def emit(self, record: logging.LogRecord) -> None:
        self.print_message(about(), record.getMessage())

    def print_message(self, cell: str, message: str) -> None:
        """Prints a message, of several cells with the first that it is about."""
        if message not in self.known:
            self.known.add(message)
            self.print(f"{cell}: {message}" if cell and not self.is_single else message)

    def print(self, text: str) -> None:
        """Prints a line above the live view; of a progress bar only its last state."""
        self.console.print(text.rstrip("\r").rpartition("\r")[2], markup=False, soft_wrap=True)

    def update(self, states: Sequence[CellState]) -> None:
        """Prints the cells that have ended since the last call, and shows what trains."""
        self.done = sum(len(state.results) for state in states)
        total = sum(len(state.states) for state in states if not state.refused)
        new = [state for state in states if state.is_over and state.id not in self.ended]
        self.ended |= {state.id for state in new}
        for state in new if not self.is_single else ():
            reason = state.refused or "; ".join(state.failures)
            error = f": {reason}" if reason else ""
            self.print(f"[{self.done}/{total} runs] {state.status:<8} {state.title}{error}")
        running = {stack.folder: stack for state in states for stack in _running(state)}
        head = f"{self.done}/{total} runs, {format_duration(time.monotonic() - self.began)} elapsed"
        if left := self._time_left(total, running.values()):
            head += f", {left} left"
        titles = {state.id: state.title for state in states}
        rows = [f"  {_row(stack, titles)}" for stack in running.values()]
        if self.console.is_terminal:
            self._draw([head, *rows])
        elif rows and time.monotonic() - self._line_at > SECONDS_BETWEEN_LINES:
            self._line_at = time.monotonic()
            self.print(f"{head}: " + "; ".join(row.strip() for row in rows))

    def _time_left(self, total: int, running: Iterable[StackState]) -> str:
        """By the mean time of the runs so far; empty before the first has ended."""
        elapsed = time.monotonic() - self.began
        parts = sum(len(one.members) * one.step / max(one.total, 1) for one in running)
        done = self.done - self.begun_with + parts
        return format_duration(elapsed * (total - self.done - parts) / done) if done else ""

    def _draw(self, lines: Sequence[str]) -> None:
        if self.live is None:
            live = Live(console=self.console, transient=True, auto_refresh=False)
            self.live = self._open.enter_context(live)
        texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        self.live.update(Group(*texts), refresh=True)


def _running(state: CellState) -> list[StackState]:
    return state.stacks if Status.RUNNING in state.states.values() else []


def _row(stack: StackState, titles: dict[str, str]) -> str:
    first, *others = dict.fromkeys(titles[cell] for cell, _ in stack.members if cell in titles)
    more = f" and {len(others)} more" if others else ""
    return f"{first}{more}  step {stack.step}/{stack.total}" if stack.total else f"{first}{more}"
