"""What a sweep shows while it runs: a live view on a terminal, otherwise a line per cell."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from normexp.config.outcome import Outcome
from normexp.config.spec import format_duration
from normexp.records.logs import CellFilter, OnceFilter, messages_to
from normexp.records.result import Status
from normexp.sweeps.worker import WorkerState

SECONDS_BETWEEN_LINES = 60.0  # between progress lines without a terminal
SHORTEST = 0.1  # seconds left that are shown
COUNTED = (
    *(Status.FINISHED, Status.SKIPPED, Status.FAILED, Status.REFUSED),
    *(Status.STOPPED, Status.PLANNED),
)


class Display(logging.Handler):
    """Counts the cells that have ended and estimates the time left. Writes to stderr.

    Inside its `with` block also prints normexp's log messages, each once; of several cells, with
    the first that it is about.

    Args:
        num_slots: how many stacks are trained at once.

    Attributes:
        total: the runs of the command, each once.
        done: those of the cells that have ended.
    """

    def __init__(self, titles: Sequence[str], num_slots: int = 1) -> None:
        super().__init__()
        self.addFilter(OnceFilter())
        self.addFilter(CellFilter())
        self.titles = titles
        self.num_slots = max(1, num_slots)
        self.counts: Counter[str] = Counter()
        self.total, self.done = len(titles), 0
        self.seconds: list[float] = []  # training time of each finished cell
        self.is_stopping = False  # this command starts no further cell
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
        cell = vars(record)["cell"] if len(self.titles) > 1 else ""
        self.print(f"{cell}: {record.getMessage()}" if cell else record.getMessage())

    def print(self, text: str) -> None:
        """Prints lines above the live view; a progress bar only in its last state."""
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
        self.console.print("\n".join(lines), markup=False, soft_wrap=True)

    def ended(self, title: str, outcome: Outcome, num_runs: int, num_left: int) -> None:
        """Prints the outcome of a cell, its error, and how many runs have ended.

        Args:
            num_runs: of this cell.
            num_left: cells that have not ended.
        """
        self.counts[outcome.status] += 1
        self.done += num_runs
        if outcome.status is Status.FINISHED and outcome.seconds:
            self.seconds.append(outcome.seconds)
        if outcome.status is Status.PLANNED or len(self.titles) == 1:  # the summary shows it
            return
        count = f"[{self._count()}]"
        duration = (
            f" in {format_duration(outcome.seconds)}" if outcome.status is Status.FINISHED else ""
        )
        word, _, rest = outcome.error.partition(": ")  # the refused word, perhaps in the title
        reason = rest if word in title.split() else outcome.error
        error = f": {reason}" if reason else ""
        left = self.time_left(num_left)
        time_left = f", {left} left" if left and self.live is None else ""
        self.print(f"{count} {outcome.status:<8} {title}{duration}{error}{time_left}")

    def _count(self) -> str:
        return f"{self.done}/{self.total} runs"

    def time_left(self, num_cells: int, at_work: Sequence[WorkerState] = ()) -> str:
        """The time left, estimated from the mean time of the finished cells.

        Empty before the first cell has finished, while a worker starts, and past that time.

        Args:
            num_cells: those that no worker has yet.
        """
        is_known = self.seconds and not self.is_stopping and all(w.is_ready for w in at_work)
        if not is_known or not (num_cells or at_work):
            return ""
        mean = sum(self.seconds) / len(self.seconds)
        rest = mean * num_cells + sum(_rest_of(worker, mean) for worker in at_work)
        left = rest / self.num_slots
        return format_duration(left) if left >= SHORTEST else ""  # later than expected

    def update(self, workers: Sequence[WorkerState], num_waiting: int) -> None:
        """Shows what the workers are doing now."""
        busy = [worker for worker in workers if worker.taken]
        if self.console.is_terminal:
            self._draw(busy, num_waiting)
        elif busy and time.monotonic() - self._line_at > SECONDS_BETWEEN_LINES:
            self._line_at = time.monotonic()
            self.print(f"{self._headline(busy, num_waiting)}: " + "; ".join(map(self._row, busy)))

    def _draw(self, busy: Sequence[WorkerState], num_waiting: int) -> None:
        if self.live is None:
            live = Live(console=self.console, transient=True, auto_refresh=False)
            self.live = self._open.enter_context(live)
        rows = [f"  {self._row(worker)}" for worker in busy]
        texts = [Text(row, no_wrap=True, overflow="ellipsis") for row in rows]
        self.live.update(Group(Text(self._headline(busy, num_waiting)), *texts), refresh=True)

    def _headline(self, busy: Sequence[WorkerState], num_waiting: int) -> str:
        counts = [f"{self.counts[name]} {name}" for name in COUNTED if self.counts[name]]
        parts = [self._count(), *counts, f"{len(busy)} running"]
        parts.append(f"{format_duration(time.monotonic() - self.began)} elapsed")
        left = self.time_left(num_waiting, busy)
        return ", ".join([*parts, f"{left} left"] if left else parts)

    def _row(self, worker: WorkerState) -> str:
        first, *others = worker.taken
        more = f" and {len(others)} more" if others else ""
        done, total = worker.steps
        how_far = f"step {done}/{total}" if total else "starting"
        return f"{self.titles[first]}{more}  {how_far}"


def _rest_of(worker: WorkerState, mean: float) -> float:
    """Seconds left for a cell, by its own speed once 5 % of its steps are done."""
    elapsed = time.monotonic() - worker.since
    done, total = worker.steps
    if total and done / total > 0.05:
        return elapsed * (total - done) / done
    return max(0.0, mean - elapsed)
