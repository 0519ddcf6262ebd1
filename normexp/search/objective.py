"""What a search maximises or minimises: the mean over seeds of a metric on validation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.records.result import Result
from normexp.reporting.metric import Metric, describe_metric


@dataclass(frozen=True)
class Objective:
    """A validation metric, and the worst value it can have, which a diverged run stands for."""

    metric: Metric

    @property
    def name(self) -> str:
        return self.metric.name

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.metric.higher_is_better else "minimize"

    @property
    def worst(self) -> float:
        return 0.0 if self.metric.higher_is_better else math.inf

    def is_better(self, a: float, b: float) -> bool:
        return a > b if self.metric.higher_is_better else a < b

    def mean(self, values: Sequence[float | None]) -> float:
        """Over seeds; a value that is missing or not finite is the worst."""
        known = [v if v is not None and math.isfinite(v) else self.worst for v in values]
        return statistics.fmean(known)

    def of_results(self, results: Sequence[Result]) -> float:
        """The value of a trial from all its ended runs.

        Raises:
            UserError: a finished run has no such metric.
        """
        for result in results:
            if result.status == "finished" and self.name not in result.metrics:
                known = ", ".join(name for name in result.metrics if name.startswith("val/"))
                raise UserError(f"tune.metric={self.name}: no run has it; there are {known}")
        return self.mean(
            [r.metrics[self.name] if r.status == "finished" else None for r in results]
        )


def choose_objective(asked: str | None, data: Data) -> Objective:
    """The metric asked for, else accuracy, bits per byte or loss, whichever the task has first.

    Raises:
        UserError: the task has no such metric.
    """
    names = ["val/loss"]
    if data.task == "classification":
        names.insert(0, "val/accuracy")
    elif data.bytes_per_token is not None:
        names.insert(0, "val/bits_per_byte")
    if asked is None:
        return Objective(describe_metric(names[0]))
    if asked.partition("@")[0] not in names:
        raise UserError(f"tune.metric={asked}: {data.name} has {' and '.join(names)}")
    return Objective(describe_metric(asked))
