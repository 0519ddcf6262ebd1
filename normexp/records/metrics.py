"""metrics.csv, the history of a run with one value per line; and which way a metric improves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from normexp.errors import UserError
from normexp.records.files import write_text

HEADER = "step,epoch,samples_seen,name,value"
LOWER_IS_BETTER = ("loss", "bits_per_byte", "perplexity", "error")


class MetricRow(NamedTuple):
    """One value after `step` optimizer steps; `epoch` counts finished epochs."""

    step: int
    epoch: int
    samples_seen: int
    name: str
    value: float


def direction_of(metric: str) -> str:
    """`min` or `max`: which way a metric improves, such as val/loss or test/accuracy@precise."""
    kind = metric.partition("@")[0].rpartition("/")[2]
    return "min" if any(word in kind for word in LOWER_IS_BETTER) else "max"


def write_metrics(path: Path, rows: Iterable[MetricRow]) -> None:
    """Replaces metrics.csv atomically. Values keep every digit; a loss may be nan or inf here."""
    lines = [f"{step},{epoch},{seen},{name},{value!r}" for step, epoch, seen, name, value in rows]
    write_text(path, "\n".join([HEADER, *lines, ""]))


def read_metrics(path: Path) -> list[MetricRow]:
    """Reads the rows of a metrics.csv. Raises UserError if it is missing or was edited."""
    try:
        _, *lines = path.read_text(encoding="utf-8").splitlines()
        return [
            MetricRow(int(step), int(epoch), int(seen), name, float(value))
            for step, epoch, seen, name, value in (line.split(",") for line in lines)
        ]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); remove the folder {path.parent} and run again"
        ) from error
