"""Reads the ended runs of studies as rows, with what was asked of each cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from yaml import YAMLError

from normexp.config.keys import value_at
from normexp.config.slots import Slots
from normexp.config.words import format_count
from normexp.errors import UserError
from normexp.records.archive import Archive
from normexp.records.layout import (
    CONFIG_FILE,
    METRICS_FILE,
    RESULT_FILE,
    find_study,
    list_runs,
    search_dir,
    seed_dir,
)
from normexp.records.result import (
    MetricRow,
    Result,
    Status,
    read_evaluation,
    read_metrics,
    read_result,
    read_samples,
)
from normexp.records.study import (
    CellState,
    CommandEntry,
    Entry,
    Refusal,
    read_entries,
    read_study,
)
from normexp.reporting.metric import Metric, is_at_chance

NUM_BLOCKS = 20  # of a test text: its sequences are not independent
ROUNDED = 1e-4  # relative; a mean over float32 samples may differ from the metric by this much
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where it was built
SLOTS = asdict(Slots())  # and their defaults
Config = Mapping[str, Any]  # plain values, nested keys joined by dots (`norm.num_groups`)
Samples = Mapping[str, np.ndarray]  # by kind of statistics, see normexp.records.result


@dataclass(frozen=True, eq=False)
class RunRow:
    """One ended run.

    directory: runs/<study>/<cell_id>/seed-<k>
    metrics: as recorded, and those of later evaluations (`val/accuracy@precise`)
    load_samples: the scores of test samples, read where they are needed
    load_config: the text of its config.yaml, likewise
    """

    study: str
    directory: Path
    result: Result
    metrics: Mapping[str, float]
    load_samples: Callable[[], Samples] = dict
    load_config: Callable[[], str] = str

    @property
    def config(self) -> Config:
        """What defines the training, except values that are defaults; see `Result.settings`."""
        return self.result.settings

    @cached_property
    def _all_values(self) -> Config:
        with suppress(YAMLError, OSError, KeyError):  # torn, or missing
            return yaml.load(self.load_config(), Loader=YAML_LOADER) or {}
        return {}

    def value_of(self, key: str) -> Any:
        """The value of a key that defines the training, also where it is a default."""
        if key in SLOTS:
            typed, own = self.config.get(key), self.value_of(f"norm.{key}")
            return next((value for value in (typed, own) if value is not None), SLOTS[key])
        return self.config[key] if key in self.config else value_at(self._all_values, key)

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
        accuracy, chance = self.metrics.get("test/accuracy"), self.result.measured.chance_accuracy
        return is_at_chance(accuracy, chance, self.num_test_samples)

    def recorded(self, metric: Metric) -> float | None:
        """The metric as shown; None unless the run has finished and recorded it."""
        value = self.metrics.get(metric.name)
        return None if self.status != Status.FINISHED or value is None else metric.scale * value

    def value(self, metric: Metric) -> float | None:
        """The metric as shown; chance level where the run diverged or is at chance."""
        chance = metric.chance(self.result.measured.chance_accuracy)
        value = self.recorded(metric)
        if self.status == Status.DIVERGED:
            return chance
        if value is None or chance is None:
            return value
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
class SearchRecord:
    """The search that chose the values of a cell.

    keys: whose values it chose
    points: what it tried, each with its seeds; empty where NAME-search is not there
    """

    keys: frozenset[str]
    points: frozenset[tuple[str, tuple[int, ...]]]


@dataclass
class Records:
    """The records of one or more studies, as a report needs them.

    runs: in order of cells and seeds
    asked: by study and cell id, the seeds that each command asks for, the first command first;
        for other cells, the recorded seeds count
    searches: by study and cell id, the search that chose the cell
    planned: cells that were asked for and have no ended run, with their study
    problems: one line for each result that cannot be read, and each cell that nobody asked for and
        that has no ended run
    """

    runs: list[RunRow] = field(default_factory=list)
    asked: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)
    searches: dict[tuple[str, str], SearchRecord] = field(default_factory=dict)
    planned: list[tuple[str, CellState]] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_study(self, name: str, root: Path) -> None:
        """Adds the ended runs of a folder, and what was asked of it."""
        study, runs, problems = read_study(root), [], dict[str, None]()
        for run_dir in list_runs(root):
            if (run_dir / RESULT_FILE).exists():
                try:
                    runs.append(read_run(name, run_dir))
                except UserError as error:  # all runs of an old schema give the same line
                    problems[str(error)] = None
        ended = {run.directory.parent for run in runs}
        for cell in study.cells.values():
            if cell.directory in ended or cell.refused:
                continue
            if cell.title != cell.id:
                self.planned.append((name, cell))
            if cell.directory.is_dir() and (cell.title == cell.id or not runs):
                problems[
                    f"{cell.id}: {format_count(len(cell.states), 'run')} begun, none ended"
                ] = None
        refused = list(study.refusals.values())
        if not runs:
            reasons = [*problems, *(f"refused: {one.error}" for one in refused)]
            if not reasons:
                raise UserError(
                    f"study={name} is empty: {root} has no runs; train one with study={name}"
                )
            raise UserError(f"study={name} has no readable result; the first problem: {reasons[0]}")
        self.runs += runs
        self.refused += refused
        self.problems += problems
        trials = read_entries(search_dir(root))
        self.add_commands(name, study.commands, trials)

    def add_archive(self, archive: Archive) -> None:
        """Adds a study that ships as a zip."""
        folder, study = archive.path.with_suffix(""), archive.path.stem
        self.runs += [
            RunRow(
                study,
                seed_dir(folder / result.cell_id, result.seed),
                result,
                result.metrics,
                load_samples=partial(archive.samples, result.cell_id, result.seed),
                load_config=partial(archive.config, result.cell_id),
            )
            for result in archive.results()
        ]
        self.add_commands(study, archive.entries, archive.trials)

    def add_commands(self, study: str, entries: Iterable[Entry], trials: Iterable[Entry]) -> None:
        """Adds what the commands of a study asked for. trials: of the search NAME-search."""
        commands, of_search = (
            [entry for entry in known if isinstance(entry, CommandEntry)]
            for known in (entries, trials)
        )
        for command in commands:
            for cell, one in command.cells.items():
                self.asked.setdefault((study, cell), []).append(sorted(one.seeds))
        if of_search or not study.endswith("-search"):  # whose cells are points themselves
            found = _searches(commands, of_search)
            self.searches |= {(study, cell): search for cell, search in found.items()}


def read_studies(runs_dir: Path, names: Sequence[str]) -> Records:
    """Reads the studies, finished or still running.

    Raises:
        UserError: a study that does not exist, or that has no ended run.
    """
    records = Records()
    for name in names:
        root = find_study(runs_dir, name)
        if root.is_file():
            records.add_archive(Archive(root))
        else:
            records.add_study(name, root)
    return records


def read_run(study: str, run_dir: Path) -> RunRow:
    """The row of an ended run. Raises UserError for a result that cannot be read."""
    result = read_result(run_dir)
    if not isinstance(result.settings.get("batch_size"), int):
        raise UserError(f"{run_dir / RESULT_FILE} has no batch_size; was it edited by hand?")
    metrics = {**read_evaluation(run_dir), **result.metrics}  # the training's take precedence
    config = run_dir.parent / CONFIG_FILE
    return RunRow(
        *(study, run_dir, result, metrics),
        load_samples=partial(read_samples, run_dir),
        load_config=partial(config.read_text, encoding="utf-8"),
    )


def _searches(
    commands: Sequence[CommandEntry], trials: Sequence[CommandEntry]
) -> dict[str, SearchRecord]:
    """By cell id, the last search that chose it. trials: the commands of NAME-search."""
    found = {}
    for command in (one for one in commands if one.searched):
        words = tuple(f"{key}=" for key in command.searched)
        points: dict[str, set[tuple[str, tuple[int, ...]]]] = {}  # by the other words of a title
        for trial in (one for one in trials if one.command == command.command):
            for one in trial.cells.values():
                rest, point = _split(one.title, words)
                points.setdefault(rest, set()).add((point, tuple(sorted({*one.seeds}))))
        keys = frozenset(key.lstrip("+") for key in command.searched)
        for cell, one in command.cells.items():
            rest, _ = _split(one.title, words)
            found[cell] = SearchRecord(keys, frozenset(points.get(rest, ())))
    return found


def _split(title: str, searched: tuple[str, ...]) -> tuple[str, str]:
    """The words of a title that do not begin with any of `searched`, and those that do."""
    words = title.split()
    point = [word for word in words if word.startswith(searched)]
    return " ".join(word for word in words if word not in point), " ".join(point)
