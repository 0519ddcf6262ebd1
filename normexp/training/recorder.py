"""Where the numbers of a training go: metrics.csv and the loggers of each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pytorch_lightning.loggers import Logger

from normexp.records.metrics import MetricRow, write_metrics

Columns = dict[str, list[float]]  # a value per replica, by metric
Position = tuple[int, int, int]  # optimizer steps done, epoch, samples seen


class Recorder:
    """Keeps the rows of each run, which go into checkpoints, and passes them to its loggers.

    Args:
        files: metrics.csv of each run; None: not written. Empty for a process that records nothing.
        loggers: Lightning loggers of each run.

    Attributes:
        rows: of each run, (step, epoch, samples seen, name, value).
    """

    def __init__(
        self, files: Sequence[Path | None], loggers: Sequence[Sequence[Logger]] | None = None
    ) -> None:
        self.files = files
        self.loggers = loggers or [[] for _ in files]
        self.rows: list[list[tuple[int, int, int, str, float]]] = [[] for _ in files]

    def record(self, position: Position, values: Columns) -> None:
        """Records a value per replica for each metric, except those that are not finite."""
        step, epoch, samples_seen = position
        for index, loggers in enumerate(self.loggers):
            of_run = {name: column[index] for name, column in values.items()}
            of_run = {name: value for name, value in of_run.items() if math.isfinite(value)}
            self.rows[index] += [(*position, name, value) for name, value in of_run.items()]
            more = {"epoch": epoch, "samples_seen": samples_seen}
            for logger in loggers if of_run else ():
                logger.log_metrics({**of_run, **more}, step=step)

    def write(self) -> None:
        """Writes the rows so far to metrics.csv."""
        for path, rows in zip(self.files, self.rows, strict=False):
            if path is not None:
                write_metrics(path, [MetricRow(*row) for row in rows])


def finite_mean(column: Sequence[float]) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = [value for value in column if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
