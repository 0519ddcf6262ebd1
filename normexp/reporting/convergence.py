"""Whether training had converged: the end of the training loss in metrics.csv."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normexp.errors import UserError
from normexp.records.metrics import read_metrics
from normexp.records.paths import METRICS_FILE

STILL_FALLING = 0.01  # share of the first training loss, from one fifth of the steps to the next


@dataclass(frozen=True)
class TrainingEnd:
    """The training loss of a cell over the last fifth of its steps, as mean over runs.

    fall: mean over the fifth before less this mean, as a share of the first loss; None if a fifth
        has no recorded loss
    """

    loss: float
    fall: float | None

    @property
    def words(self) -> str:
        """`0.67 (still falling)`."""
        if self.fall is None:
            return f"{self.loss:.2g} (slope unknown)"
        end = "still falling" if self.fall > STILL_FALLING else "converged"
        return f"{self.loss:.2g} ({'rising' if self.fall < -STILL_FALLING else end})"


def training_end(directories: Iterable[str]) -> TrainingEnd | None:
    """The end of the training loss over runs; None if no run has recorded one."""
    losses, falls = [], []
    for directory in directories:
        rows = []
        with suppress(UserError):  # a torn file does not fail the report
            rows = read_metrics(Path(directory) / METRICS_FILE)
        curve = [
            (row.step, row.value)
            for row in rows
            if row.name == "train/loss" and math.isfinite(row.value)
        ]
        if not curve:
            continue
        steps, values = np.array(curve).T
        fifth = np.ceil(5 * steps / steps[-1])
        last, before = values[fifth == 5], values[fifth == 4]
        losses.append(last.mean())
        if len(before):
            falls.append((before.mean() - last.mean()) / values[0])
    if not losses:
        return None
    return TrainingEnd(float(np.mean(losses)), float(np.mean(falls)) if falls else None)
