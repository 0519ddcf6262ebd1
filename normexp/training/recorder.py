"""Where the numbers of a training go: metrics.csv and the loggers of each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytorch_lightning.loggers import Logger

from normexp.records.metrics import MetricRow, write_metrics

Columns = dict[str, list[float]]  # a value per replica, by metric


@dataclass(frozen=True)
class Position:
    """A position in training; `step` counts optimizer steps done."""

    step: int
    epoch: int
    samples_seen: int


class Recorder:
    """Keeps the rows of each run, which go into checkpoints, and passes them to its loggers.

    Args:
        files: metrics.csv of each run; None: not written.
        loggers: Lightning loggers of each run.
    """

    def __init__(
        self, files: Sequence[Path | None], loggers: Sequence[Sequence[Logger]] = ()
    ) -> None:
        self.files = files
        self.loggers = loggers
        self.rows: list[list[MetricRow]] = [[] for _ in files]

    @property
    def tracks(self) -> bool:
        """True if tracked values have a receiver."""
        return any(self.loggers)

    def record(self, position: Position, values: Columns) -> None:
        """Records a value per replica for each metric, except those that are not finite."""
        where = position.step, position.epoch, position.samples_seen
        for index, rows in enumerate(self.rows):
            named = _finite(values, index)
            rows += [MetricRow(*where, name, value) for name, value in named.items()]
        self.track(position, values)

    def track(self, position: Position, values: Columns) -> None:
        """Logs values that metrics.csv must not have, since a repetition would not repeat them."""
        more = {"epoch": position.epoch, "samples_seen": position.samples_seen}
        for index, loggers in enumerate(self.loggers):
            if named := _finite(values, index):
                for logger in loggers:
                    logger.log_metrics({**named, **more}, step=position.step)

    def write(self) -> None:
        """Writes the rows so far to metrics.csv."""
        for path, rows in zip(self.files, self.rows, strict=True):
            if path is not None:
                write_metrics(path, rows)

    def state_dict(self) -> list[list[tuple[int, int, int, str, float]]]:
        return [[tuple(row) for row in rows] for rows in self.rows]

    def load_state_dict(self, state: list[list[tuple[int, int, int, str, float]]]) -> None:
        if self.files:  # a process that writes nothing has no rows
            self.rows = [[MetricRow(*row) for row in rows] for rows in state]


def _finite(values: Columns, index: int) -> dict[str, float]:
    row = {name: column[index] for name, column in values.items()}
    return {name: value for name, value in row.items() if math.isfinite(value)}


def finite_mean(column: Sequence[float]) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = [value for value in column if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
