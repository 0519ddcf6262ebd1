"""One writer of per-run rows: metrics.csv and W&B get each run, Lightning's loggers the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pytorch_lightning.loggers import Logger


@dataclass(frozen=True)
class Position:
    """Where in training a value belongs; `step` counts optimizer steps done."""

    step: int
    epoch: int
    samples_seen: int


class RunSink(Protocol):
    """What takes the rows of one run; `records.MetricsWriter` is one."""

    def add(
        self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]
    ) -> None: ...
    def flush(self) -> None: ...
    def truncate_after(self, step: int) -> None: ...


class Recorder:
    """Hands each run's values to its sinks and the mean over the stack to Lightning's loggers.

    Args:
        sinks: for each replica, the sinks of its run.
        loggers: Lightning loggers, for the stack as a whole.
    """

    def __init__(self, sinks: Sequence[Sequence[RunSink]], loggers: Sequence[Logger] = ()) -> None:
        self.sinks = sinks
        self.loggers = loggers

    def record(self, position: Position, values: dict[str, list[float]]) -> None:
        """`values` maps a metric to a number per replica; one that is not finite is absent."""
        for index, run_sinks in enumerate(self.sinks):
            row = {name: column[index] for name, column in values.items()}
            finite = {name: value for name, value in row.items() if math.isfinite(value)}
            for sink in run_sinks:
                sink.add(position.step, position.epoch, position.samples_seen, finite)
        means = {name: finite_mean(column) for name, column in values.items()}
        present = {name: mean for name, mean in means.items() if mean is not None}
        for logger in self.loggers:
            logger.log_metrics(present, step=position.step)

    def flush(self) -> None:
        """Everything recorded so far reaches the disk: called before a checkpoint."""
        for sink in (sink for run_sinks in self.sinks for sink in run_sinks):
            sink.flush()

    def truncate_after(self, step: int) -> None:
        """Forgets rows beyond `step`, as training resumes from there."""
        for sink in (sink for run_sinks in self.sinks for sink in run_sinks):
            sink.truncate_after(step)


def finite_mean(column: Sequence[float]) -> float | None:
    """Mean over the replicas that have a finite value; None where none has."""
    finite = [value for value in column if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
