"""What verdicts are made of: a row for each run, and what was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normexp.errors import UserError
from normexp.verdicts.metric import Metric, is_at_chance
from normexp.verdicts.settings import Roles

ROUNDED = 1e-4  # the relative error of a mean over float32 samples
Config = Mapping[str, Any]  # plain values, nested keys joined by dots (`norm.num_groups`)
Samples = Mapping[str, np.ndarray]  # by kind of statistics (`running`, `precise`)


class Status(StrEnum):
    """The state of a run."""

    FINISHED = "finished"
    DIVERGED = "diverged"  # ended, after a loss or a metric that was not finite
    FAILED = "failed"
    RUNNING = "running"
    INTERRUPTED = "interrupted"  # with a checkpoint
    NOT_STARTED = "not started"
    UNREADABLE = "unreadable"


class MetricRow(NamedTuple):
    """One value after `step` optimizer steps; `epoch` is that of the step, from 0."""

    step: int
    epoch: int
    samples_seen: int
    name: str
    value: float


@dataclass(frozen=True, eq=False)
class Row:
    """One run that finished, diverged or failed.

    config: what defines the training, defaults left out, with sizes, budget and learning rate as
        they act
    metrics: finite numbers by name (`test/accuracy`, `val/accuracy@precise`)
    defaults: every setting with its value, also those that `config` lacks, because they have their
        defaults or act through others alone (`base_batch_size`)
    typed: the part of `config` that was asked for, and digests of what was loaded; values that
        follow from equal ones do not keep runs from being compared
    measured: what else was measured, as `timing.step_ms`, `traits.mixes_samples`
    directory: runs/<study>/<cell_id>/seed-<k>
    error: why it failed
    load_samples, load_history: read the scores of test samples, and every value of metrics.csv
    load_picture: reads a PNG of predictions; empty if there is none
    """

    study: str
    cell_id: str
    seed: int
    status: Status
    config: Config
    metrics: Mapping[str, float]
    defaults: Config = field(default_factory=dict)
    typed: Config = field(default_factory=dict)
    measured: Config = field(default_factory=dict)
    directory: Path = Path()
    error: str | None = None
    load_samples: Callable[[], Samples] = dict
    load_history: Callable[[], Sequence[MetricRow]] = tuple
    load_picture: Callable[[], bytes] = bytes

    def value_of(self, key: str) -> Any:
        """The value of a setting, also where it is a default."""
        return self.config.get(key, self.defaults.get(key))

    def part(self, name: str) -> dict[str, Any]:
        """What was measured below a name, such as `timing`, without missing values."""
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.measured.items()
            if key.startswith(prefix) and value is not None
        }

    @property
    def mixes_samples(self) -> bool:
        """True unless it was found that a sample does not move the outputs of others."""
        return self.measured.get("traits.mixes_samples") is not False

    @property
    def chance_accuracy(self) -> float | None:
        """The accuracy of predicting the most frequent class; None for texts."""
        return self.measured.get("chance_accuracy")

    @cached_property
    def _samples(self) -> Samples:
        with suppress(UserError):  # a torn file does not fail the report
            return self.load_samples()
        return {}

    @property
    def num_test_samples(self) -> int:
        """0 if not recorded."""
        return max(map(len, self._samples.values()), default=0)

    @property
    def has_text(self) -> bool:
        """True if its test samples are those of a text, whose order matters."""
        return any("bits_per_byte" in name for name in self.metrics)

    @cached_property
    def is_at_chance(self) -> bool:
        share, chance = self.metrics.get("test/iou"), self.part("chance").get("iou")
        if share is None:
            share, chance = self.metrics.get("test/accuracy"), self.chance_accuracy
        return is_at_chance(share, chance, self.num_test_samples)

    def chance(self, metric: Metric) -> float | None:
        """The metric, as shown, of always naming the most frequent class; None if not known."""
        recorded = self.part("chance").get(metric.kind)
        if recorded is None or metric.chance_level is not None:
            return metric.chance(self.chance_accuracy)
        return metric.scale * recorded

    def recorded(self, metric: Metric) -> float | None:
        """The metric as shown; None unless the run has finished and recorded it."""
        value = self.metrics.get(metric.name)
        return None if self.status != Status.FINISHED or value is None else metric.scale * value

    def value(self, metric: Metric) -> float | None:
        """The metric as shown; chance level where the run diverged or is at chance."""
        chance = self.chance(metric)
        value = self.recorded(metric)
        if self.status == Status.DIVERGED:
            return chance
        if value is None or chance is None:
            return value
        is_beyond = metric.unit == "bits per byte" and value > chance
        return chance if self.is_at_chance or is_beyond else value

    def samples(self, metric: Metric) -> np.ndarray:
        """The metric of each test sample as shown, with the mean `value`; empty if not recorded.

        Those of a text are its sequences, in their order.
        """
        value = self.value(metric)
        kind = metric.name.partition("@")[2] or "running"
        samples = self._samples.get(kind, np.empty(0))
        if value is None or not metric.name.startswith("test/") or not len(samples):
            return np.empty(0)
        if value != self.recorded(metric):  # chance level
            return np.full(len(samples), value)
        if self.has_text:
            samples = samples.astype(np.float64)
            mean = float(samples.mean())
            return samples * (value / mean) if mean else samples
        samples = metric.scale * samples
        return samples if abs(samples.mean() - value) <= ROUNDED * abs(value) else np.empty(0)

    def history(self) -> list[MetricRow]:
        """Every finite value of metrics.csv, up to the divergence of a run; none if torn."""
        with suppress(UserError):
            return [row for row in self.load_history() if math.isfinite(row.value)]
        return []


class Point(NamedTuple):
    """What a search tried: a value per searched key, as `comparable` makes it; and the seeds."""

    values: tuple[tuple[str, Any], ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class SearchRecord:
    """The search that chose the values of a cell.

    keys: the keys whose values it chose
    points: what it tried; empty without a study NAME-search
    """

    keys: frozenset[str]
    points: frozenset[Point]

    @property
    def rates(self) -> list[float]:
        """The learning rates that it tried, the smallest first."""
        rates = set()
        for point in self.points:
            for key, (_, value) in point.values:
                if key == "lr":
                    rates.add(value)
        return sorted(rates)


@dataclass(frozen=True)
class PlannedCell:
    """A cell that was asked for and has no ended run. config, defaults: as of a Row."""

    study: str
    cell_id: str
    directory: Path
    seeds: Sequence[int]
    config: Config
    defaults: Config = field(default_factory=dict)


class RefusedCell(NamedTuple):
    """A cell that cannot be trained. title: its words"""

    title: str
    error: str


@dataclass(frozen=True)
class Confirmation:
    """The best tries of a study and its baseline, trained anew on seeds that no run had before.

    number: the first of a study is 1
    baseline, finalists: ids of cells
    """

    study: str
    number: int
    baseline: str
    finalists: tuple[str, ...]
    seeds: frozenset[int]

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.baseline, *self.finalists)

    def has(self, run: Row) -> bool:
        is_of_cell = run.study == self.study and run.cell_id in self.cells
        return is_of_cell and run.seed in self.seeds


@dataclass
class Rows:
    """The runs of one or more studies, and what was asked for.

    runs: in order of cells and seeds
    asked: by study and cell id, the seeds that each command asks for, the first command first, but
        for those of confirmations; for other cells, the recorded seeds count
    commands: by study and cell id, the number of the command that first asked for the cell
    confirmations: in the order in which they began
    searches: by study and cell id, the search that chose the cell
    roles: which of their settings play a part of their own
    problems: one line for each result that cannot be read, and each cell that nobody asked for and
        that has no run here
    notes: what else a reader must know
    """

    runs: list[Row] = field(default_factory=list)
    asked: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)
    commands: dict[tuple[str, str], int] = field(default_factory=dict)
    confirmations: list[Confirmation] = field(default_factory=list)
    searches: dict[tuple[str, str], SearchRecord] = field(default_factory=dict)
    planned: list[PlannedCell] = field(default_factory=list)
    refused: list[RefusedCell] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    roles: Roles = Roles()


def comparable(value: Any) -> Hashable:
    """A hashable that is equal for equal values: 1 equals 1.0, and true equals no number."""
    if isinstance(value, list | tuple):
        return tuple(map(comparable, value))
    if isinstance(value, Mapping):
        return tuple((key, comparable(item)) for key, item in sorted(value.items()))
    return (isinstance(value, bool), value)
