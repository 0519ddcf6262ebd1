"""What a command shows while it trains: a bar, a line per training, and one per cell that ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from normexp.training.records.logs import messages_to
from normexp.training.records.result import values_of
from normexp.training.records.stack_state import StackState
from normexp.training.records.study import CellState
from normexp.training.studies.terminal import main_metric, mean_words, without_shared_words
from normexp.training.sweeps.machine import console_for_progress
from normexp.verdicts.metric import OF_TEST
from normexp.words import format_duration

SECONDS_BETWEEN_LINES = 60.0  # without a terminal
SHARE_FOR_A_GUESS = 0.05  # of the work, before the time left is guessed
Row = tuple[str, str, str, str]  # a training: its title, steps, metrics and time left


class Display(logging.Handler):
    """Prints to stderr the cells that end, what trains now, and messages, each line once.

    On a terminal a bar and a line per training are redrawn; elsewhere they are printed once a
    minute.

    Args:
        states: the cells before anything trains.
        metrics: one of them is shown of a cell that has ended, the first that it has.
    """

    def __init__(self, states: Sequence[CellState], metrics: Sequence[str] = OF_TEST) -> None:
        super().__init__()
        self.metrics = metrics
        self.ended: set[str] = set()
        self.num_ended = 0  # runs of ended cells
        self.total = sum(len(state.states) for state in states)
        self.done_before = _num_runs_done(states) + _share_done(states)
        titles = [state.title for state in states]
        if len(titles) > 1:
            _, titles = without_shared_words(titles)
        self.titles: dict[str, str] = {}
        for state, title in zip(states, titles, strict=True):
            self.titles[state.id] = title
            if state.is_over:
                self.ended.add(state.id)
                self.num_ended += len(state.states)
        self.began = self._line_at = time.monotonic()
        self.first_seen: dict[Path, tuple[float, int]] = {}  # time and step, by stack
        self.printed: set[str] = set()
        self.console = console_for_progress()
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
        """Prints a new line above the live view. Of a progress bar, prints the last state alone."""
        if text not in self.printed:
            self.printed.add(text)
            last_state = text.rstrip("\r").rpartition("\r")[2]
            one_line = not self.console.is_terminal  # which would break words
            self.console.print(last_state, markup=False, soft_wrap=one_line)

    def update(self, states: Sequence[CellState]) -> None:
        """Prints the cells that have ended since the last call, and shows what trains."""
        for state in states:
            if state.is_over and state.id not in self.ended:
                self.ended.add(state.id)
                self.num_ended += len(state.states)
                if len(states) > 1:
                    self.print(self._line_of(state))
        rows: dict[Path, Row] = {}  # by stack, since a stack may be of several cells
        for state in states:
            for stack in state.stacks:
                if stack.holder and stack.folder not in rows:
                    rows[stack.folder] = self._row(state, stack)
        done = _num_runs_done(states)
        if done == self.total and not self.live.is_started:
            return
        times = self._times(done + _share_done(states))
        if self.console.is_terminal:
            if not self.live.is_started:
                self._open.enter_context(self.live)
            lines = _lines_of([*rows.values()], self.console.width) if rows else "starting"
            self.live.update(Group(self._bar(done, times), lines), refresh=True)
        elif time.monotonic() - self._line_at > SECONDS_BETWEEN_LINES:
            self._line_at = time.monotonic()
            lines = ["  ".join(filter(None, row)) for row in rows.values()]
            self.print("\n  ".join([f"{done}/{self.total} runs, {times}", *lines]))

    def _line_of(self, state: CellState) -> str:
        """An ended cell. The closing table has the reason of a failure."""
        count = f"[{self.num_ended}/{self.total} runs]"
        result = self._result_of(state)
        return f"{count} {state.status:<8} {self.titles[state.id]}  {result}".rstrip()

    def _result_of(self, state: CellState) -> str:
        """`test/accuracy 0.9711 (sd 0.0072)`, as the closing table shows it."""
        name = main_metric(state.results, self.metrics)
        values = values_of(state.results, name)
        return f"{name} {mean_words(values)}" if values else ""

    def _row(self, state: CellState, stack: StackState) -> Row:
        title = self.titles[state.id]
        if len(stack.members) == 1:
            title += f" seed {stack.members[0][1]}"
        # `train/loss` as loss, and the metric of the validation split as val: there is little room.
        metrics = []
        for name, value in stack.metrics.items():
            short, _, _ = name.removeprefix("train/").partition("/")
            metrics.append(f"{short} {value:.3g}")
        now = time.monotonic()
        since, first = self.first_seen.setdefault(stack.folder, (now, stack.step))
        left = _time_left(now - since, stack.step - first, stack.total - first)
        steps = f"step {stack.step}/{stack.total}" if stack.total else "starting"
        return title, steps, "  ".join(metrics), left

    def _times(self, done: float) -> str:
        """The time elapsed, and the time left by the mean time of a run so far."""
        elapsed = time.monotonic() - self.began
        left = _time_left(elapsed, done - self.done_before, self.total - self.done_before)
        return ", ".join(filter(None, [f"{format_duration(elapsed)} elapsed", left]))

    def _bar(self, done: int, times: str) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        for width in (None, 1, None):
            grid.add_column(no_wrap=True, ratio=width)
        grid.add_row(f"{done}/{self.total} runs", ProgressBar(self.total, done), times)
        return grid


def _time_left(seconds: float, done: float, total: float) -> str:
    """`3 min left`, if the work done took these seconds; empty while too little is done."""
    if done <= SHARE_FOR_A_GUESS * total:
        return ""
    return f"{format_duration(seconds * (total - done) / done)} left"


def _lines_of(rows: Sequence[Row], width: int) -> Table | Text:
    """A line per training; where one has no room, two: its title, and its steps below."""
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(columns) + 2 * len(columns) > width:
        lines = [f"{title}\n  {'  '.join(filter(None, rest))}" for title, *rest in rows]
        return Text("\n".join(lines))
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1)
    for _ in range(3):
        grid.add_column(no_wrap=True, justify="right")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def _num_runs_done(states: Sequence[CellState]) -> int:
    return sum(len(state.states) if state.refused else len(state.results) for state in states)


def _share_done(states: Sequence[CellState]) -> float:
    """How much of the begun stacks is done, in runs."""
    shares = {}  # by stack, since a stack may be of several cells
    for state in states:
        for stack in state.stacks:
            shares[stack.folder] = len(stack.members) * stack.step / max(stack.total, 1)
    return sum(shares.values())
