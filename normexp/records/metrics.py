"""metrics.csv: the history of one run in long form, one value per line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import NamedTuple

from normexp.errors import UserError
from normexp.records.files import appending, read_lines, write_text

HEADER = "step,epoch,samples_seen,name,value"
LINES = re.compile(rb"(?:\d+,\d+,\d+,[^,\n]+,[^,\n]+\n)*")


class MetricRow(NamedTuple):
    """One value after `step` optimizer steps; `epoch` counts finished epochs."""

    step: int
    epoch: int
    samples_seen: int
    name: str
    value: float


class MetricsWriter:
    """Appends rows to metrics.csv. Creates the file, not its directory.

    Rows wait in memory until `flush`. Flush before each checkpoint, so that the file is never
    behind the step at which a resumed run continues. Values keep every digit; a loss may be nan or
    inf here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.flush()

    def add(self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]) -> None:
        """Adds one row per metric. Raises ValueError for a name that would break the csv."""
        for name, value in metrics.items():
            if not name or any(character in name for character in ',"\r\n'):
                raise ValueError(f"metric name {name!r} has a comma, a quote or a line break")
            position = f"{index(step)},{index(epoch)},{index(samples_seen)}"
            self._waiting.append(f"{position},{name},{float(value)!r}")

    def flush(self) -> None:
        """Writes the waiting rows to disk. After an OSError they are still waiting."""
        if not self._waiting and self.path.exists():
            return
        with appending(self.path) as lines:
            header = [] if self.path.stat().st_size else [HEADER]
            lines += [*header, *self._waiting]
        self._waiting.clear()


def write_metrics(path: Path, rows: Iterable[MetricRow]) -> None:
    """Replaces metrics.csv atomically. Values keep every digit; a loss may be nan or inf here."""
    lines = [f"{step},{epoch},{seen},{name},{value!r}" for step, epoch, seen, name, value in rows]
    write_text(path, "\n".join([HEADER, *lines, ""]))


def read_metrics(path: Path) -> list[MetricRow]:
    """Reads the rows of a metrics.csv, also while its run goes on.

    Raises:
        UserError: the file is missing or not a metrics.csv, or has a broken line.
    """
    try:
        return [_parse(path, number, line) for number, line in _data_lines(path)]
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: its run has not started") from error


def fault_of(path: Path, num_steps: int | None) -> str:
    """Why the metrics.csv of an ended run does not hold all of its rows; empty if it does.

    Args:
        num_steps: of the run, at whose last step it was evaluated; None if not recorded.
    """
    content = path.read_bytes()
    header, _, body = content.partition(b"\n")
    if not content:
        return "is empty"
    match = LINES.match(body)
    assert match is not None  # as it may be empty
    if header != HEADER.encode() or match.end() < len(body):
        number = 1 if header != HEADER.encode() else 2 + match.group().count(b"\n")
        return f"is torn at line {number}"
    step = int(body.splitlines()[-1].partition(b",")[0]) if body else 0
    return "" if num_steps is None or step == num_steps else f"ends at step {step} of {num_steps}"


def _data_lines(path: Path) -> list[tuple[int, str]]:
    """Returns the numbered lines below the header."""
    lines = list(enumerate(read_lines(path), start=1))
    if lines and lines[0][1] != HEADER:
        raise UserError(f"{path} is not a metrics.csv: line 1 is not {HEADER}; move the file away")
    return lines[1:]


def _parse(path: Path, number: int, line: str) -> MetricRow:
    try:
        step, epoch, samples_seen, name, value = line.split(",")
        return MetricRow(int(step), int(epoch), int(samples_seen), name, float(value))
    except ValueError as error:
        raise UserError(
            f"{path} line {number} is not {HEADER}: {line[:60]!r}; "
            f"remove the folder {path.parent} and run again"
        ) from error
