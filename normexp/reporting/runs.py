"""Reads the ended runs of studies as rows, with what was asked of each cell."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normexp.errors import UserError
from normexp.records.archive import Archive
from normexp.records.journal import CommandEntry, Entry, Refusal, Request, read_entries
from normexp.records.layout import (
    METRICS_FILE,
    RESULT_FILE,
    find_study,
    list_runs,
    search_dir,
    seed_dir,
)
from normexp.records.metrics import MetricRow, read_metrics
from normexp.records.result import (
    Result,
    Status,
    first_spellings,
    places_of,
    read_evaluation,
    read_result_of_study,
)
from normexp.records.samples import read_samples
from normexp.records.study import CellState, read_study
from normexp.reporting.metric import Metric, is_at_chance
from normexp.words import format_count

NUM_BLOCKS = 20  # a test text is cut into blocks, since its sequences are not independent
ROUNDED = 1e-4  # the relative error of a mean over float32 samples
Config = Mapping[str, Any]  # plain values, nested keys joined by dots (`norm.num_groups`)
Samples = Mapping[str, np.ndarray]  # by kind of statistics, see normexp.records.result


class Point(NamedTuple):
    """What a search tried: a value of each searched key, and the seeds."""

    values: tuple[tuple[str, Any], ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RunRow:
    """One ended run.

    directory: runs/<study>/<cell_id>/seed-<k>
    metrics: those of the training and of later evaluations (`val/accuracy@precise`)
    load_samples: reads the scores of test samples
    """

    study: str
    directory: Path
    result: Result
    metrics: Mapping[str, float]
    load_samples: Callable[[], Samples] = dict

    @property
    def config(self) -> Config:
        """What defines the training, except values that are defaults; see `Result.settings`."""
        return self.result.settings

    @property
    def values(self) -> Config:
        """What defines the training, values that are defaults included."""
        return self.result.values

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
        """0 if not recorded."""
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

        The samples of a text are contiguous blocks of its sequences.
        """
        value = self.value(metric)
        kind = metric.name.partition("@")[2] or "running"
        samples = self._samples.get(kind, np.empty(0))
        if value is None or not metric.name.startswith("test/") or not len(samples):
            return np.empty(0)
        is_text = samples.dtype != bool
        if is_text:
            starts = np.linspace(0, len(samples), NUM_BLOCKS + 1).astype(int)[:-1]
            sums = np.add.reduceat(samples.astype(np.float64), starts)
            samples = sums * len(sums) / len(samples)  # blocks of any length, with the same mean
        if value != self.recorded(metric):  # chance level
            return np.full(len(samples), value)
        mean = float(samples.mean())
        if is_text and mean:
            return samples * (value / mean)
        samples = metric.scale * samples
        return samples if abs(samples.mean() - value) <= ROUNDED * abs(value) else np.empty(0)

    def history(self) -> list[MetricRow]:
        """Every finite value of metrics.csv, up to the divergence of a run; none if torn."""
        with suppress(UserError):
            rows = read_metrics(self.directory / METRICS_FILE)
            return [row for row in rows if math.isfinite(row.value)]
        return []


@dataclass(frozen=True)
class SearchRecord:
    """The search that chose the values of a cell.

    keys: the keys whose values it chose
    points: what it tried, each with its seeds; empty without a study NAME-search
    """

    keys: frozenset[str]
    points: frozenset[Point]

    @property
    def rates(self) -> list[float]:
        """The learning rates that it tried, the smallest first."""
        return sorted(
            {rate for point in self.points for key, (_, rate) in point.values if key == "lr"}
        )


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
        study, runs, problems = read_study(root), [], []
        for run_dir in list_runs(root):
            if (run_dir / RESULT_FILE).exists():
                try:
                    runs.append(read_run(name, run_dir))
                except UserError as error:
                    problems.append(str(error))
        ended = {run.directory.parent for run in runs}
        for cell in study.cells.values():
            if cell.directory in ended or cell.refused:
                continue
            is_asked_for = bool(cell.request.settings)
            if is_asked_for:
                self.planned.append((name, cell))
            if cell.directory.is_dir() and not (is_asked_for and runs):
                begun = format_count(len(cell.states), "run")
                problems.append(f"{cell.id}: {begun} begun, none ended")
        refused = list(study.refusals.values())
        problems = list(dict.fromkeys(problems))  # all runs of an old schema give the same line
        if not runs:
            reasons = [*problems, *(f"refused: {refusal.error}" for refusal in refused)]
            if not reasons:
                raise UserError(
                    f"study={name} is empty: {root} has no runs; train one with study={name}"
                )
            raise UserError(f"study={name} has no readable result; the first problem: {reasons[0]}")
        self.runs += runs
        self.refused += refused
        self.problems += problems
        self.add_commands(name, study.commands, read_entries(search_dir(root)))

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
            )
            for result in archive.results()
        ]
        self.add_commands(study, archive.entries, archive.search_entries)

    def add_commands(
        self, study: str, entries: Iterable[Entry], search_entries: Iterable[Entry]
    ) -> None:
        """Adds what the commands of a study asked for. search_entries: lines of NAME-search."""
        commands = [entry for entry in entries if isinstance(entry, CommandEntry)]
        for command in commands:
            for cell, asked in command.cells.items():
                self.asked.setdefault((study, cell), []).append(sorted(asked.seeds))
        trials = [entry for entry in search_entries if isinstance(entry, CommandEntry)]
        if not trials and study.endswith("-search"):  # its own cells are points of a search
            return
        for command in commands:
            if command.searched:
                for cell, search in _searches_of(command, trials).items():
                    self.searches[study, cell] = search


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


def join_spellings(records: Records) -> Records:
    """Records in which the same contents have one path, that of the first run.

    Cells of a study that differ in their paths alone become one, with the seeds of all.
    """
    spellings = first_spellings(run.result.defines for run in records.runs)
    by_cell: dict[tuple[str, str], list[RunRow]] = defaultdict(list)
    for run in records.runs:
        by_cell[run.study, run.result.cell_id].append(run)
    asked = dict(records.asked)
    first_ids: dict[tuple[str, str], str] = {}  # by study and what defines the training
    joined: dict[tuple[str, str, int], RunRow] = {}
    renamed: dict[tuple[str, str], str] = {}
    for (study, cell_id), runs in by_cell.items():
        # A run that failed early does not know its contents.
        known = max((places_of(run.result.defines) for run in runs), key=len)
        paths = {key: spellings[key, digest] for key, digest in known}
        renamed |= {(key, path): paths[key] for (key, _), path in known.items()}
        changed = [_with_paths(run.result.defines, paths) for run in runs]
        content = json.dumps(max(changed, key=len), sort_keys=True) if paths else cell_id
        first_id = first_ids.setdefault((study, content), cell_id)
        of_cell = asked.pop((study, cell_id), [[run.seed for run in runs]])
        asked[study, first_id] = [*asked.get((study, first_id), []), *of_cell]
        for run, defines in zip(runs, changed, strict=True):
            result = replace(run.result, cell_id=first_id, defines=defines)
            joined.setdefault((study, first_id, run.seed), replace(run, result=result))
    planned = []
    for study, cell in records.planned:
        settings = dict(cell.request.settings)
        for (key, path), first_path in renamed.items():
            if settings.get(key) == path:
                settings[key] = first_path
        request = replace(cell.request, settings=settings)
        planned.append((study, replace(cell, request=request)))
    return replace(records, runs=[*joined.values()], asked=asked, planned=planned)


def _with_paths(defines: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """What defines a run, with other values of these keys of its groups."""
    changed = dict(defines)
    for key, path in paths.items():
        group, _, name = key.partition(".")
        changed[group] = {**changed[group], name: path}
    return changed


def read_run(study: str, run_dir: Path) -> RunRow:
    """The row of an ended run. Raises UserError for a result that cannot be read."""
    result = read_result_of_study(run_dir)
    if not isinstance(result.settings.get("batch_size"), int):
        raise UserError(f"{run_dir / RESULT_FILE} has no batch_size; was it edited by hand?")
    metrics = {**read_evaluation(run_dir), **result.metrics}  # the training's take precedence
    return RunRow(study, run_dir, result, metrics, load_samples=partial(read_samples, run_dir))


def _searches_of(command: CommandEntry, trials: Sequence[CommandEntry]) -> dict[str, SearchRecord]:
    """The search that chose each cell of a command. trials: the commands of NAME-search."""

    def shared_words(request: Request) -> tuple[str, ...]:
        """The words that all points of its search share."""
        searched = tuple(f"{key}=" for key in command.searched)
        return tuple(word for word in request.words if not word.startswith(searched))

    keys = [key.lstrip("+") for key in command.searched]
    points: dict[tuple[str, ...], set[Point]] = defaultdict(set)
    for trial in trials:
        if trial.command == command.command:
            for request in trial.cells.values():
                values = tuple((key, comparable(request.values.get(key))) for key in keys)
                point = Point(values, tuple(sorted({*request.seeds})))
                points[shared_words(request)].add(point)
    return {
        cell: SearchRecord(frozenset(keys), frozenset(points[shared_words(request)]))
        for cell, request in command.cells.items()
    }


def comparable(value: Any) -> Hashable:
    """A hashable that is equal for equal values: 1 equals 1.0, and true equals no number."""
    if isinstance(value, list | tuple):
        return tuple(map(comparable, value))
    if isinstance(value, Mapping):
        return tuple((key, comparable(item)) for key, item in sorted(value.items()))
    return (isinstance(value, bool), value)
