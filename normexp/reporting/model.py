"""What a report is about: runs, the cells that they repeat, and slices of comparable cells.

All are made once from the records; verdict.py compares the cells of a slice.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from normexp.errors import UserError
from normexp.records.metrics import MetricRow, read_metrics
from normexp.records.paths import METRICS_FILE
from normexp.records.result import Result
from normexp.records.samples import count_samples, read_samples
from normexp.reporting.metric import Metric, describe_metric, is_at_chance
from normexp.stats.contrast import Seeds
from normexp.stats.crossfit import CrossFit, cross_fit
from normexp.stats.interval import Interval, mean
from normexp.stats.sensitivity import Sensitivity, batch_size_sensitivity, selection_optimism

AXIS_WORDS = {"norm_batch_size": "norm batch size", "batch_size": "batch size"}
# Recorded keys that were measured, are derived from others, or have no effect on a result.
NOT_COMPARED = (
    *("mixes_samples", "leaks_future", "chance_accuracy", "stacked", "log_every"),
    *("split", "norm_slots", "loaded_sources"),
)
ROUNDED = 1e-4  # relative; a mean over float32 samples may differ from the metric by this much
Config = Mapping[str, Any]  # plain values, nested keys joined by dots (`norm.num_groups`)
Values = dict[int, float]  # by seed


@dataclass(frozen=True, eq=False)
class RunRow:
    """One ended run.

    directory: runs/<study>/<cell_id>/seed-<k>
    config: everything recorded that defines the training but its seed
    metrics: as recorded, and those of later evaluations (`val/accuracy@precise`)
    """

    study: str
    directory: Path
    result: Result
    config: Config
    metrics: Mapping[str, float]

    @property
    def seed(self) -> int:
        return self.result.seed

    def value(self, metric: Metric) -> float | None:
        """The metric as shown; None unless the run has finished and recorded it."""
        if self.result.status != "finished" or metric.name not in self.metrics:
            return None
        return metric.scale * self.metrics[metric.name]

    def samples(self, metric: Metric) -> np.ndarray:
        """The metric of each test sample as shown; empty if their mean is not the recorded value.

        Only metrics that are a mean over samples, such as accuracy, have them.
        """
        kind = metric.name.partition("@")[2] or "running"
        samples, value = np.empty(0), self.value(metric)
        with suppress(UserError):  # a torn file does not fail the report
            samples = metric.scale * read_samples(self.directory).get(kind, samples)
        if value is None or not len(samples):
            return np.empty(0)
        return samples if abs(samples.mean() - value) <= ROUNDED * abs(value) else np.empty(0)

    @cached_property
    def num_test_samples(self) -> int:
        """0: not recorded."""
        return count_samples(self.directory)

    @cached_property
    def is_at_chance(self) -> bool:
        chance, accuracy = self.config.get("chance_accuracy"), self.metrics.get("test/accuracy")
        return is_at_chance(accuracy, chance, self.num_test_samples)

    def history(self) -> list[MetricRow]:
        """Every finite value of metrics.csv, up to the divergence of a run; none if torn."""
        with suppress(UserError):
            rows = read_metrics(self.directory / METRICS_FILE)
            return [row for row in rows if math.isfinite(row.value)]
        return []


@dataclass(frozen=True, eq=False)
class CellRow:
    """A cell with its ended runs, in order of seeds.

    directory: runs/<study>/<cell_id>
    same_as: other ids of the study whose recorded recipe is equal; their runs count here
    name: of the norm alone
    lr: None if not recorded
    batch_size, micro_batch_size, norm_batch_size: effective, never None
    mixes_samples: False if the norm was measured not to mix samples
    expected: how many seeds any cell of the study has
    norm: the label of its line: the name, the knobs in which cells of that norm differ, and the
        study if there are several; `base`: the label without the study
    settings: values that must be equal in cells that are compared
    setting: how the settings differ from those of other cells, in words
    title: model, data and `setting`
    budget: `epochs=12`; empty if none is recorded
    searched: keys whose values the searches of the study chose
    num_points: of these searches for the cell's norm, the points of the longest; 0: none
    declared: the seeds of the first command that names the cell; empty if none is known
    steps: by metric, the smallest difference that recorded values of a run could have
    round: 0 if that was the first command of the study for any of its cells, 1 for the next
    unended: declared cells of the study, up to that round, that have not all of their seeds
    rule: of the margin, as that command declared it; see normexp.reporting.metric
    """

    study: str
    directory: Path
    runs: Sequence[RunRow]
    config: Config
    name: str
    model: str
    data: str
    lr: float | None
    batch_size: int
    micro_batch_size: int
    norm_batch_size: int
    mixes_samples: bool
    expected: int
    same_as: Sequence[str] = ()
    norm: str = ""
    base: str = ""
    settings: Config = field(default_factory=dict)
    setting: str = ""
    title: str = ""
    budget: str = ""
    budget_keys: frozenset[str] = frozenset()
    searched: frozenset[str] = frozenset()
    num_points: int = 0
    declared: frozenset[int] = frozenset()
    round: int = 0
    unended: int = 0
    rule: Config = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)

    @property
    def protocol(self) -> str:
        """How the norm batch size comes about: `full`, `accumulated` or `ghost`."""
        if self.norm_batch_size < self.micro_batch_size:
            return "ghost"
        return "accumulated" if self.micro_batch_size < self.batch_size else "full"

    @property
    def statistics_size(self) -> int:
        """The norm batch size; 0 if samples do not mix."""
        return self.norm_batch_size if self.mixes_samples else 0

    @property
    def finished(self) -> int:
        return self._count("finished")

    @property
    def diverged(self) -> int:
        return self._count("diverged")

    @property
    def failed(self) -> int:
        return self._count("failed")

    @property
    def lost(self) -> int:
        return self.diverged + self.failed

    @property
    def missing(self) -> int:
        return self.expected - len(self.runs)

    @property
    def early(self) -> int:
        """Runs that a callback ended before the planned steps."""
        return sum(run.result.stopped is not None for run in self.runs)

    @property
    def invalid(self) -> str | None:
        """Why its numbers must not be compared."""
        return next((run.result.invalid for run in self.runs if run.result.invalid), None)

    @property
    def error(self) -> str | None:
        return next((run.result.error for run in self.runs if run.result.error), None)

    @cached_property
    def place(self) -> Hashable:
        """Equal for cells whose settings are equal but for the budget."""
        return frozenset(
            (key, comparable(value))
            for key, value in self.settings.items()
            if key not in self.budget_keys
        )

    @property
    def state_of_seeds(self) -> Seeds:
        """Whether it has the seeds that were declared."""
        if not self.declared:
            return "undeclared"
        if self.ended == self.declared:
            return "complete"
        return "extended" if self.ended > self.declared else "incomplete"

    @property
    def ended(self) -> set[int]:
        """The seeds that have finished or diverged."""
        return self.seeds_with("finished", "diverged")

    def seeds_with(self, *statuses: str) -> set[int]:
        return {run.seed for run in self.runs if run.result.status in statuses}

    @cached_property
    def at_chance(self) -> set[int]:
        """The seeds that name classes no better than always the most frequent one."""
        return {run.seed for run in self.runs if run.is_at_chance}

    def values(self, metric: Metric) -> dict[int, float]:
        """The metric as shown, by seed, of the runs that have it."""
        known = ((run.seed, run.value(metric)) for run in self.runs)
        return {seed: value for seed, value in known if value is not None}

    def step(self, metric: Metric) -> float:
        """The smallest difference that shown values of two runs could have; 0: not known."""
        return metric.scale * self.steps.get(metric.name, 0.0)

    def mean(self, metric: Metric) -> Interval:
        """The mean over seeds as every table and figure shows it."""
        values = list(self.values(metric).values())
        return mean(values, step=self.step(metric), bounds=metric.bounds)

    @property
    def is_own(self) -> bool:
        """True for a norm that the user gave by `_target_`."""
        target = str(self.config.get("norm._target_", ""))
        return "." in target and not target.startswith("torch.")

    def _count(self, status: str) -> int:
        return len(self.seeds_with(status))


@dataclass(frozen=True, eq=False)
class Slice:
    """Norms along one size, the axis, all else equal.

    title: model, data and other settings that distinguish the slice
    fixed: the other size, in words
    slug: suffix of file names
    lines: the cell of each norm at each size that was run; of several learning rates the best.
        Along norm_batch_size, an independent norm has one cell, which stands at every size.
    independent: the norms that do not mix samples, along norm_batch_size
    rates: by norm and size, cells that differ in learning rate alone, where there are several
    values: the metric of every cell of `lines` and `rates`, by seed
    is_metric_given: the user chose the metric of the report, and not the one that comes first
    """

    title: str
    fixed: str
    slug: str
    axis: str
    sizes: Sequence[int]
    metric: Metric
    lines: Mapping[str, Mapping[int, CellRow]]
    independent: frozenset[str]
    rates: Mapping[tuple[str, int], Sequence[CellRow]]
    values: Mapping[CellRow, Values]
    is_metric_given: bool = False

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.fixed}"

    @property
    def norms(self) -> list[str]:
        return list(self.lines)

    @property
    def points(self) -> list[tuple[int, CellRow]]:
        """Every size and its cell, by norm and then by size."""
        return [point for line in self.lines.values() for point in line.items()]

    @property
    def smallest(self) -> dict[str, CellRow]:
        """By norm, the cells at the smallest size."""
        size = self.sizes[0]
        return {norm: line[size] for norm, line in self.lines.items() if size in line}

    @property
    def first(self) -> CellRow:
        return self.points[0][1]

    @property
    def data(self) -> str:
        return self.first.data

    @property
    def model(self) -> str:
        return self.first.model

    @property
    def budget(self) -> str:
        """`epochs=12`; empty if the cells have several budgets."""
        return _only({cell.budget for cell in self.values})

    @property
    def place(self) -> Hashable:
        """Equal for slices that differ only in their budget."""
        return (self.axis, self.fixed, self.metric.name, self.first.place)

    @property
    def runs(self) -> list[RunRow]:
        return [run for cell in self.values for run in cell.runs]

    @cached_property
    def shared(self) -> Config:
        """What all cells have in common."""
        return {key: values[0] for key, values in self._config.items() if _all_equal(values)}

    @cached_property
    def differences(self) -> Mapping[str, Sequence[Any]]:
        """In what its cells differ: for each key the values of the cells, in their order."""
        return {key: values for key, values in self._config.items() if not _all_equal(values)}

    @cached_property
    def _config(self) -> dict[str, list[Any]]:
        keys = sorted({key for cell in self.values for key in compared(cell.config)})
        return {key: [cell.config.get(key) for cell in self.values] for key in keys}

    @property
    def is_tuned(self) -> bool:
        """True if the learning rate of a norm is chosen from a complete grid."""
        return any(self.tuned(cell) is not None for _, cell in self.points)

    @cached_property
    def step(self) -> float:
        """The greatest `CellRow.step` of its cells."""
        return max((cell.step(self.metric) for cell in self.values), default=0.0)

    @cached_property
    def outcomes(self) -> Mapping[CellRow, Values]:
        """What is compared of the cells of `lines`, by seed.

        A diverged run has the worst value of any run there. A cell whose learning rate was chosen
        from a complete grid has the values of `cross_fit`; only their mean has a meaning.
        """
        outcomes = {}
        for cell in dict.fromkeys(cell for _, cell in self.points):
            by_seed, tuned = self.with_diverged(cell), self.tuned(cell)
            sign = 1.0 if self.metric.higher_is_better else -1.0
            if tuned is not None:
                by_seed = dict(zip(by_seed, (sign * tuned.values).tolist(), strict=True))
            outcomes[cell] = by_seed
        return outcomes

    def grid(self, cell: CellRow) -> Sequence[CellRow]:
        """The cells among which a cell was chosen by its learning rate; itself if it was not."""
        return self.alternatives(cell) or [cell]

    def is_complete(self, cell: CellRow) -> bool:
        """True if all rates of its grid have the same three or more seeds, with scores."""
        known = []
        for other in self.grid(cell):
            lost = _diverged(other, 0.0).keys()
            known += [self.with_diverged(other).keys(), lost | other.values(self.selection).keys()]
        return len(known[0]) >= 3 and all(seeds == known[0] for seeds in known)

    def tuned(self, cell: CellRow) -> CrossFit | None:
        """The outcomes over seeds, higher is better, of a cell that a complete grid tunes."""
        if cell not in self._tuned:
            self._tuned[cell] = self._cross_fit(cell)
        return self._tuned[cell]

    def chosen(self, cell: CellRow) -> list[CellRow]:
        """The cells of its grid that some split of the seeds chooses; itself without a grid."""
        tuned = self.tuned(cell)
        if tuned is None:
            return [cell]
        return [c for c, share in zip(self.grid(cell), tuned.shares, strict=True) if share > 0]

    def at_chance(self, cell: CellRow) -> set[int]:
        """The seeds that are at chance, at any rate that is chosen."""
        return set[int].union(*(other.at_chance for other in self.chosen(cell)))

    def _cross_fit(self, cell: CellRow) -> CrossFit | None:
        if len(self.grid(cell)) < 2 or not self.is_complete(cell):
            return None
        tables = [self.with_diverged(other) for other in self.grid(cell)]
        sign = 1.0 if self.metric.higher_is_better else -1.0
        values = sign * np.array([[*by_seed.values()] for by_seed in tables])
        return cross_fit(self.scores(cell, [*tables[0]]), values)

    @cached_property
    def _tuned(self) -> dict[CellRow, CrossFit | None]:
        return {}  # of the cells that were asked for

    def scores(self, cell: CellRow, seeds: Sequence[int]) -> np.ndarray:
        """By which its rate is chosen, (num_rates, n): higher is better, -inf if diverged."""
        sign = 1.0 if self.selection.higher_is_better else -1.0
        tables = [other.values(self.selection) for other in self.grid(cell)]
        return np.array(
            [[sign * by_seed[s] if s in by_seed else -np.inf for s in seeds] for by_seed in tables]
        )

    @cached_property
    def selection(self) -> Metric:
        """By which learning rates are chosen."""
        return describe_metric(self.metric.selection_name)

    def mean(self, cell: CellRow) -> Interval:
        """The mean of a cell as tables and figures show it: cross-fitted where a grid tunes it."""
        tuned = self.tuned(cell)
        if tuned is None:
            return cell.mean(self.metric)
        values = tuned.values if self.metric.higher_is_better else -tuned.values
        return mean(values, step=cell.step(self.metric), bounds=self.metric.bounds)

    def search_words(self, cell: CellRow) -> str:
        """`tuned over 5 rates, best rate at an edge in 70 % of splits`; empty without a search."""
        rates = self.alternatives(cell)
        if not rates:
            return ""
        tuned = self.tuned(cell)
        if tuned is None:
            return f"best of {len(rates)} rates, {self._why_not_tuned(cell)}"
        share = f"{100 * tuned.share_at_edges:.0f} % of splits"
        edge = f", best rate at an edge in {share}" if tuned.is_at_edge else ""
        return f"tuned over {len(rates)} rates{edge}"

    def _why_not_tuned(self, cell: CellRow) -> str:
        seeds = [frozenset(other.ended) for other in self.grid(cell)]
        if any(other.failed for other in self.grid(cell)):
            return "runs failed"
        if len(set(seeds)) == 1 and len(seeds[0]) < 3:
            return f"by {len(seeds[0])} seed{'s' * (len(seeds[0]) != 1)} each: tuning takes 3"
        return "search incomplete"

    def with_diverged(self, cell: CellRow) -> Values:
        """The values of a cell, in which a diverged run has the worst value of `lines`."""
        lost = {} if self._worst is None else _diverged(cell, self._worst)
        return dict(sorted((self.values[cell] | lost).items()))

    @cached_property
    def _worst(self) -> float | None:
        known = [value for _, cell in self.points for value in self.values[cell].values()]
        return (min if self.metric.higher_is_better else max)(known, default=None)

    def samples_of(self, cell: CellRow) -> Mapping[int, np.ndarray]:
        """The metric of each test sample, by seed; a diverged run has those of the worst run."""
        if cell not in self._samples:
            runs = {run.seed: run.samples(self.metric) for run in cell.runs}
            lost = _diverged(cell, 0.0)
            self._samples[cell] = runs | dict.fromkeys(lost, self._samples_of_worst)
        return self._samples[cell]

    @cached_property
    def _samples(self) -> dict[CellRow, Mapping[int, np.ndarray]]:
        return {}  # of the cells that were asked for

    @cached_property
    def _samples_of_worst(self) -> np.ndarray:
        cells = dict.fromkeys(cell for _, cell in self.points)
        known = [(run, run.value(self.metric)) for cell in cells for run in cell.runs]
        values = [(value, run) for run, value in known if value is not None]
        if not values:
            return np.empty(0)
        pick = min if self.metric.higher_is_better else max
        return pick(values, key=lambda pair: pair[0])[1].samples(self.metric)

    def sensitivity(self, norm: str) -> Sensitivity:
        """What a norm of two or more sizes loses between them; without sizes that have no run."""
        line = list(self.lines[norm].items())
        line = [point for point in line if point in (line[0], line[-1]) or self.outcomes[point[1]]]
        seeds = sorted({seed for _, cell in line for seed in self.outcomes[cell]})
        values = [[self.outcomes[cell].get(seed, math.nan) for _, cell in line] for seed in seeds]
        return batch_size_sensitivity(
            np.array(values).reshape(len(seeds), len(line)),
            [size for size, _ in line],
            higher_is_better=self.metric.higher_is_better,
            tolerance=self.metric.tolerance,
            step=self.step,
            limit=self.metric.limit,
        )

    def alternatives(self, cell: CellRow) -> Sequence[CellRow]:
        """The cells among which this one was chosen, itself included; none if nothing was.

        They are in order of their learning rate.
        """
        cells = next((cells for cells in self.rates.values() if cell in cells), ())
        return sorted(cells, key=lambda other: other.lr or 0)

    def optimism(self, cell: CellRow) -> float | None:
        """`selection_optimism` of a cell whose learning rate was chosen; None for other cells.

        In the unit of the metric, positive if the choice flatters. The candidates are the rates at
        which as many runs were lost.
        """
        candidates = [other for other in self.alternatives(cell) if other.lost == cell.lost]
        if not candidates:
            return None
        sign = 1 if self.metric.higher_is_better else -1
        tables = [[other.values(self.selection) for other in candidates]]
        tables += [[self.values[other] for other in candidates]]
        seeds = set[int].intersection(*(set(by_seed) for table in tables for by_seed in table))
        scores, values = (
            sign * np.array([[by_seed[seed] for by_seed in table] for seed in sorted(seeds)])
            for table in tables
        )
        return selection_optimism(scores, values)


def metric_names(cells: Iterable[CellRow]) -> list[str]:
    """The metrics that any of the runs has."""
    return sorted({name for cell in cells for run in cell.runs for name in run.metrics})


def compared(config: Config) -> Config:
    """What two cells are compared by: without NOT_COMPARED."""
    return {key: value for key, value in config.items() if not key.startswith(NOT_COMPARED)}


def differences(first: CellRow, second: CellRow) -> dict[str, tuple[Any, Any]]:
    """By key, the two values in which the recipes of two cells differ."""
    first_recipe, second_recipe = compared(first.config), compared(second.config)
    both = {
        key: (first_recipe.get(key), second_recipe.get(key))
        for key in sorted({*first_recipe, *second_recipe})
    }
    return {key: pair for key, pair in both.items() if not _all_equal(pair)}


def comparable(value: Any) -> Hashable:
    """A key that is equal for equal values: 1 is 1.0, and true is no number."""
    if isinstance(value, list | tuple):
        return tuple(map(comparable, value))
    return (isinstance(value, bool), value)


def _all_equal(values: Sequence[Any]) -> bool:
    return len({comparable(value) for value in values}) <= 1


def _only(values: set[str]) -> str:
    return values.pop() if len(values) == 1 else ""


def _diverged(cell: CellRow, value: float) -> dict[int, float]:
    return {run.seed: value for run in cell.runs if run.result.status == "diverged"}
