"""metrics.csv: the history of one run in long form, one value a line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import NamedTuple

from normexp.errors import UserError
from normexp.records.files import append_whole, write_text

HEADER = "step,epoch,samples_seen,name,value"


class MetricRow(NamedTuple):
    """One value after `step` optimizer steps; `epoch` counts finished epochs."""

    step: int
    epoch: int
    samples_seen: int
    name: str
    value: float


class MetricsWriter:
    """Appends rows to metrics.csv; one writer at a time, the owner of the run directory.

    Rows wait in memory until `flush`, which a caller does before each checkpoint, so that the file
    never lags behind what a resumed run takes for done. Values have every digit of their repr; a
    loss may be nan or inf here. Creates the file, not its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        self._kept: set[tuple[int, str]] = set()  # step and name of rows at the place of a cut
        if path.exists():
            _cut_torn_line(path)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.flush()

    def add(self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]) -> None:
        """One row per metric; ValueError for a name that would break a line of the csv.

        A row that was kept by `truncate_after` is not added again: what a run measures after its
        last step has the step of its last checkpoint, and may have been written before it died.
        """
        for name, value in metrics.items():
            if (step, name) in self._kept:
                continue
            if not name or any(character in name for character in ',"\r\n'):
                raise ValueError(f"metric name {name!r} has a comma, a quote or a line break")
            position = f"{index(step)},{index(epoch)},{index(samples_seen)}"
            self._waiting.append(f"{position},{name},{float(value)!r}\n")

    def flush(self) -> None:
        """Writes the waiting rows through to disk; after an OSError they are still waiting."""
        if not self._waiting and self.path.exists():
            return
        with open(self.path, "ab") as file:
            header = "" if os.fstat(file.fileno()).st_size else HEADER + "\n"
            append_whole(file.fileno(), (header + "".join(self._waiting)).encode())
        self._waiting.clear()

    def truncate_after(self, step: int) -> None:
        """Cuts the file back to the rows of at most `step`, atomically; -1 keeps the header.

        For a run that resumes from a checkpoint of that step. A torn last line goes too; rows that
        wait in memory are dropped.
        """
        self._waiting.clear()
        if not self.path.exists():
            return
        rows = _complete_lines(self.path)[1:]
        parsed = [(_parse(self.path, number, line), line) for number, line in rows]
        kept = [line for row, line in parsed if row.step <= step]
        self._kept = {(row.step, row.name) for row, _ in parsed if row.step == step}
        write_text(self.path, "\n".join([HEADER, *kept, ""]))


def read_metrics(path: Path) -> list[MetricRow]:
    """The rows of a metrics.csv, also while its run goes on: a torn last line is not a row yet.

    Raises:
        UserError: the file is missing, is no metrics.csv, or a line of it is broken.
    """
    try:
        return [_parse(path, *row) for row in _complete_lines(path)[1:]]
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: its run has not begun") from error


def _complete_lines(path: Path) -> list[tuple[int, str]]:
    """Numbered lines that end in a line break; the first is the header, checked."""
    text = path.read_bytes().decode(errors="replace")
    lines = list(enumerate(text.split("\n")[:-1], start=1))
    if lines and lines[0][1] != HEADER:
        raise UserError(f"{path} is no metrics.csv: it does not begin with {HEADER}; move it away")
    return lines


def _parse(path: Path, number: int, line: str) -> MetricRow:
    try:
        step, epoch, samples_seen, name, value = line.split(",")
        return MetricRow(int(step), int(epoch), int(samples_seen), name, float(value))
    except ValueError as error:
        raise UserError(
            f"{path} line {number} is not {HEADER}: {line[:60]!r}; "
            f"remove the folder {path.parent} and run again"
        ) from error


def _cut_torn_line(path: Path) -> None:
    """Removes what a killed writer left after the last line break."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
