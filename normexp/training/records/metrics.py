"""metrics.csv, the history of a run with one value per line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from normexp.errors import UserError
from normexp.training.records.files import write_text
from normexp.verdicts.rows import MetricRow

HEADER = "step,epoch,samples_seen,name,value"


def write_metrics(path: Path, rows: Iterable[tuple[int, int, int, str, float]]) -> None:
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
