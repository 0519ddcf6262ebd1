"""Reads the ended runs of studies as rows, with what was asked of each cell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from normexp.config.words import format_count
from normexp.errors import UserError
from normexp.records.files import read_json
from normexp.records.result import (
    EVALUATION_FILE,
    METRICS_FILE,
    RESULT_FILE,
    MetricRow,
    Result,
    Status,
    find_study,
    list_runs,
    read_metrics,
    read_result,
    read_samples,
)
from normexp.records.study import Refusal, read_study
from normexp.reporting.metric import Metric, is_at_chance

PARTS = ("norm", "model", "data", "optim")  # recorded by name, beside their recipes
RECORDED_TWICE = ("batch_size", "micro_batch_size", "norm_batch_size", "trainer")
NUM_BLOCKS = 20  # of a test text: its sequences are not independent
ROUNDED = 1e-4  # relative; a mean over float32 samples may differ from the metric by this much
Config = Mapping[str, Any]  # plain values, nested keys joined by dots (`norm.num_groups`)
Samples = Mapping[str, np.ndarray]  # by kind of statistics, see normexp.records.result


@dataclass(frozen=True, eq=False)
class RunRow:
    """One ended run.

    directory: runs/<study>/<cell_id>/seed-<k>
    config: everything recorded that defines the training but its seed
    metrics: as recorded, and those of later evaluations (`val/accuracy@precise`)
    load_samples: the scores of test samples, read where they are needed
    """

    study: str
    directory: Path
    result: Result
    config: Config
    metrics: Mapping[str, float]
    load_samples: Callable[[], Samples] = dict

    @property
    def seed(self) -> int:
        return self.result.seed

    @property
    def status(self) -> Status:
        return self.result.status

    @cached_property
    def _samples(self) -> Samples:
        with suppress(UserError):  # a torn file does not fail the report
            return self.load_samples()
        return {}

    @property
    def num_test_samples(self) -> int:
        """0: not recorded."""
        return max(map(len, self._samples.values()), default=0)

    @cached_property
    def is_at_chance(self) -> bool:
        accuracy, chance = self.metrics.get("test/accuracy"), self.config.get("chance_accuracy")
        return is_at_chance(accuracy, chance, self.num_test_samples)

    def recorded(self, metric: Metric) -> float | None:
        """The metric as shown; None unless the run has finished and recorded it."""
        value = self.metrics.get(metric.name)
        return None if self.status != Status.FINISHED or value is None else metric.scale * value

    def value(self, metric: Metric) -> float | None:
        """The metric as shown; chance level where the run diverged or is at chance."""
        chance, value = metric.chance(self.config), self.recorded(metric)
        if self.status == Status.DIVERGED or value is None or chance is None:
            return chance if self.status == Status.DIVERGED else value
        is_beyond = metric.unit == "bits per byte" and value > chance
        return chance if self.is_at_chance or is_beyond else value

    def samples(self, metric: Metric) -> np.ndarray:
        """The metric of each test sample as shown, with the mean `value`; empty if not recorded.

        Of a text it is that of contiguous blocks.
        """
        value, recorded = self.value(metric), self.recorded(metric)
        samples = self._samples.get(metric.name.partition("@")[2] or "running", np.empty(0))
        if value is None or not metric.name.startswith("test/") or not len(samples):
            return np.empty(0)
        is_text = samples.dtype != bool
        if is_text:
            starts = np.linspace(0, len(samples), NUM_BLOCKS + 1).astype(int)[:-1]
            sums = np.add.reduceat(samples.astype(np.float64), starts)
            samples = sums * len(sums) / len(samples)  # blocks of any length, with the same mean
        if value != recorded:  # chance level
            return np.full(len(samples), value)
        mean = float(samples.mean())
        if is_text and mean:
            return samples * (value / mean)
        shown = metric.scale * samples
        return shown if abs(shown.mean() - value) <= ROUNDED * abs(value) else np.empty(0)

    def history(self) -> list[MetricRow]:
        """Every finite value of metrics.csv, up to the divergence of a run; none if torn."""
        with suppress(UserError):
            rows = read_metrics(self.directory / METRICS_FILE)
            return [row for row in rows if math.isfinite(row.value)]
        return []


@dataclass(frozen=True)
class Records:
    """The records of one or more studies, as a report needs them.

    runs: in order of cells and seeds
    asked: by study and cell id, the seeds that each command asks for, the first command first;
        cells that are not there asked for the runs that they have
    searched: by study, the keys whose values a search chose
    problems: one line for each result that cannot be read, and each cell without an ended run
    """

    runs: Sequence[RunRow]
    asked: Mapping[tuple[str, str], Sequence[Sequence[int]]] = field(default_factory=dict)
    searched: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refused: Sequence[Refusal] = ()
    problems: Sequence[str] = ()


def read_studies(runs_dir: Path, names: Sequence[str]) -> Records:
    """Reads the studies, finished or still running.

    Raises:
        UserError: a study that does not exist, or that has no ended run.
    """
    studies = [_read_study(runs_dir, name) for name in names]
    return Records(
        [run for study in studies for run in study.runs],
        {place: seeds for study in studies for place, seeds in study.asked.items()},
        {name: keys for study in studies for name, keys in study.searched.items()},
        [cell for study in studies for cell in study.refused],
        [line for study in studies for line in study.problems],
    )


def _read_study(runs_dir: Path, name: str) -> Records:
    root = find_study(runs_dir, name)
    study = read_study(root)
    refused = list(study.refusals.values())
    runs, torn, begun = [], [], Counter[Path]()
    for run_dir in list_runs(root):
        if not (run_dir / RESULT_FILE).exists():
            begun[run_dir.parent] += 1
            continue
        try:
            runs.append(read_run(name, run_dir))
        except UserError as error:
            torn.append(str(error))
    ended = {run.directory.parent for run in runs}
    waiting = [
        f"{cell.name}: {format_count(count, 'run')} begun, none ended"
        for cell, count in begun.items()
        if cell not in ended
    ]
    problems = [*torn, *(f"refused: {one.error}" for one in refused), *waiting]
    if problems and not runs:
        raise UserError(f"study={name} has no readable result; the first problem: {problems[0]}")
    if not runs:
        raise UserError(f"study={name} is empty: {root} has no runs; train one with study={name}")
    asked: dict[tuple[str, str], list[list[int]]] = {}
    for command in study.commands:
        for cell, one in command.cells.items():
            asked.setdefault((name, cell), []).append(sorted(one.seeds))
    keys = frozenset(key for command in study.commands for key in command.searched)
    return Records(runs, asked, {name: keys}, refused, [*torn, *waiting])


def read_run(study: str, run_dir: Path) -> RunRow:
    """The row of an ended run. Raises UserError for a result that cannot be read."""
    result = read_result(run_dir)
    if not isinstance(result.config.get("batch_size"), int):
        raise UserError(f"{run_dir / RESULT_FILE} has no config.batch_size; was it edited by hand?")
    metrics = {**_read_evaluation(run_dir), **result.metrics}  # those of the training stand
    load = partial(read_samples, run_dir)
    return RunRow(study, run_dir, result, flat_config(result.config), metrics, load)


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded config and its recipe with dotted keys."""
    recipe = config.get("recipe", {})
    beside = {key: value for key, value in config.items() if key != "recipe"}
    names = {
        group: _name_of(beside[group], recipe.get(group) or {})
        for group in PARTS
        if group in beside
    }
    known = {key: value for key, value in recipe.items() if key not in RECORDED_TWICE}
    return flatten(known) | flatten(beside) | names


def _name_of(choice: str, part: Mapping[str, Any]) -> str:
    """`group`; `MyNorm` for a user's own class; `resnet50` for one of torchvision's models."""
    if isinstance(part.get("name"), str):
        return part["name"]
    is_own = choice == "custom" and "_target_" in part
    return part["_target_"].rpartition(".")[2] if is_own else choice


def _read_evaluation(run_dir: Path) -> dict[str, float]:
    """Metrics of evaluation.json: {"precise": {"test/loss": 1.0}} gives `test/loss@precise`."""
    path = run_dir / EVALUATION_FILE
    content = read_json(path) if path.exists() else {}
    return {
        name if statistics == "running" else f"{name}@{statistics}": value
        for statistics, metrics in content.items()
        if isinstance(metrics, dict)
        for name, value in metrics.items()
        if "/" in name and isinstance(value, float) and math.isfinite(value)
    }


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"norm": {"eps": 1}} gives {"norm.eps": 1}; lists become tuples.

    A class of normexp is reduced to its name, because its module may change between two runs.
    """
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif key == "_target_" and str(value).startswith("normexp."):
            flat[f"{prefix}{key}"] = value.rpartition(".")[2]
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat
