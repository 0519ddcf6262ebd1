"""The metrics of a split, from sums over blocks of its samples."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from normexp.batching.replicas import Batch, Measured, Replicas
from normexp.data.dataset import Data
from normexp.tasks.frozen import gather

Columns = dict[str, list[float]]  # a value per replica, by metric


class Scorer(Protocol):
    """What a score is taken of: a training task."""

    replicas: Replicas
    data: Data

    def measure(self, output: Tensor, batch: Batch) -> Measured: ...
    def summarise(self, means: Measured, split: str) -> Measured: ...


class SplitScore:
    """Sums in float64 of what `task` measures, and the metrics that their means come to."""

    def __init__(self, task: Scorer, split: str) -> None:
        self.task = task
        self.split = split
        self._sums: dict[str, Tensor] = {}  # (S,) each
        self._num_targets = 0

    def add(self, indices: Tensor, num_counted: int) -> None:
        """A forward of the samples at `indices` (N,), of which the first `num_counted` count."""
        task = self.task
        batch = gather(task.replicas, task.data, self.split, indices)

        def measure(output: Tensor, own: Batch) -> Measured:
            counted = {name: value[:num_counted] for name, value in own.items()}
            return task.measure(output[:num_counted], counted)

        for name, value in task.replicas.measure(batch, measure, shared=True).items():
            self._sums[name] = self._sums.get(name, 0) + value.double()
        self._num_targets += batch["targets"][:num_counted].numel()

    def metrics(self) -> Columns:
        """Of all that was added: `loss` and others, without the split's name."""
        means = {name: total / self._num_targets for name, total in self._sums.items()}
        summary = self.task.summarise(means, self.split)
        return {name: column.tolist() for name, column in summary.items()}
