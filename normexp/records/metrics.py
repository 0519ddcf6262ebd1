"""metrics.csv: the history of one run in long form, one value per line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from normexp.errors import UserError
from normexp.records.files import read_lines, write_text

HEADER = "step,epoch,samples_seen,name,value"


class MetricRow(NamedTuple):
    """One value after `step` optimizer steps; `epoch` counts finished epochs."""

    step: int
    epoch: int
    samples_seen: int
    name: str
    value: float


def write_metrics(path: Path, rows: Iterable[MetricRow]) -> None:
    """Replaces metrics.csv atomically. Values keep every digit; a loss may be nan or inf here."""
    lines = [f"{step},{epoch},{seen},{name},{value!r}" for step, epoch, seen, name, value in rows]
    write_text(path, "\n".join([HEADER, *lines, ""]))


def read_metrics(path: Path) -> list[MetricRow]:
    """Reads the rows of a metrics.csv.

    Raises:
        UserError: the file is missing or not a metrics.csv, or has a broken line.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: its run has not started")
    header, *lines = read_lines(path) or [""]
    if header != HEADER:
        raise UserError(f"{path} is not a metrics.csv: line 1 is not {HEADER}; move the file away")
    return [_parse(path, number, line) for number, line in enumerate(lines, start=2)]


def _parse(path: Path, number: int, line: str) -> MetricRow:
    try:
        step, epoch, samples_seen, name, value = line.split(",")
        return MetricRow(int(step), int(epoch), int(samples_seen), name, float(value))
    except ValueError as error:
        raise UserError(
            f"{path} line {number} is not {HEADER}: {line[:60]!r}; "
            f"remove the folder {path.parent} and run again"
        ) from error
