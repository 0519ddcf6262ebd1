"""Trains the points of searches, chooses on validation, and trains fresh seeds at the best."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from normexp.config.schema import in_identity
from normexp.config.cells import CellSpec
from normexp.errors import UserError
from normexp.records.paths import seed_dir
from normexp.records.result import ENDED
from normexp.records.samples import count_samples
from normexp.records.study import CellState, SearchEntry, append_entry, read_entries
from normexp.reporting.metric import Metric, choose_metric, describe_metric, format_interval
from normexp.reporting.summary import commands_to_look
from normexp.reporting.terminal import open_console, text_table
from normexp.search.points import VALIDATION, Point, Search, words_of
from normexp.stats.interval import mean
from normexp.sweeps.sweep import raise_if_stopped, run_cells

Train = Callable[[Sequence[CellSpec], Sequence[str]], list[CellState]]


@dataclass
class SearchResult:
    """The trained points of a search.

    Attributes:
        cells, outcomes: of each point, in the order of the points.
        fresh: the outcome of the fresh seeds at the best point; None without one.
    """

    search: Search
    cells: Sequence[CellSpec]
    outcomes: Sequence[CellState]
    fresh: CellState | None = None

    @cached_property
    def metric(self) -> Metric:
        """The metric `tune.metric`, or the first of VALIDATION that the runs have.

        Raises:
            UserError: no finished run has `tune.metric`.
        """
        asked = self.search.base["tune"]["metric"]
        runs = [run for outcome in self.outcomes for run in outcome.results]
        names = {name for run in runs if run.status == "finished" for name in run.metrics}
        known = sorted(name for name in names if name.startswith("val/"))
        if asked is not None and known and asked not in known:
            raise UserError(f"tune.metric={asked}: no run has this metric; try {', '.join(known)}")
        first = next((name for name in VALIDATION if name in known), VALIDATION[-1])
        return describe_metric(asked or first)

    @cached_property
    def best(self) -> tuple[Point, float] | None:
        """The point with the best mean over seeds (the first of equals), and that mean.

        None if no point has converged.
        """
        values = [
            (point, self.metric.mean_over(outcome.results))
            for point, outcome in zip(self.search.points, self.outcomes, strict=True)
            if _has_ended(outcome)
        ]
        known = [(point, value) for point, value in values if value != self.metric.worst]
        choose = max if self.metric.higher_is_better else min
        return choose(known, key=lambda pair: pair[1], default=None)


def _has_ended(state: CellState) -> bool:
    """True if all runs of a cell finished or diverged."""
    return bool(state.states) and all(one in ENDED for one in state.states.values())


def tune(searches: Sequence[Search], words: Sequence[str], train: Train) -> int:
    """Searches, trains fresh seeds at the best points, prints a table; returns the exit code.

    Args:
        train: as `train_cells`.

    Raises:
        UserError: all points are refused, or no run has the metric.
        Halted, KeyboardInterrupt: as `raise_if_stopped`.
    """
    points = [[search.cell(p, is_report=False) for p in search.points] for search in searches]
    flat = [cell for cells_of_search in points for cell in cells_of_search]
    if searches[0].base["dry_run"]:
        return run_cells([*flat, *map(_planned_report, searches)], words)
    outcomes = _train(flat, words, train)
    if all(outcome.refused for outcome in outcomes):
        raise UserError(outcomes[0].refused)
    ends = iter(outcomes)
    results = _distinct(
        SearchResult(search, cells_of_search, [next(ends) for _ in cells_of_search])
        for search, cells_of_search in zip(searches, points, strict=True)
    )
    lost = not all(map(_has_ended, outcomes))
    if lost and searches[0].base["fail_fast"]:
        print("fail_fast: the search ends here, and no fresh seeds are trained", file=sys.stderr)
    else:
        _record(results)
        chosen = [result for result in results if result.best]
        cells = [
            result.search.cell(result.best[0], is_report=True) for result in chosen if result.best
        ]
        fresh = _train(cells, words, train) if cells else []
        for result, outcome in zip(chosen, fresh, strict=True):
            result.fresh = outcome
    print_table(results)
    reported = [result.fresh is not None and _has_ended(result.fresh) for result in results]
    return 1 if lost or not all(reported) else 0


def _planned_report(search: Search) -> CellSpec:
    """The cell of the fresh seeds: of the point that they have begun at, else of the first."""
    cells = [search.cell(point, is_report=True) for point in search.points]
    begun = (cell for cell in cells if cell.config is not None and cell.directory.is_dir())
    return replace(next(begun, cells[0]), title=f"{search.title} at its best point, fresh seeds")


def _train(cells: Sequence[CellSpec], words: Sequence[str], train: Train) -> list[CellState]:
    """The state of each cell; points that are one cell have the same."""
    states = {state.id: state for state in train(cells, words)}
    raise_if_stopped(cells, [*states.values()])
    return [states[cell.id] for cell in cells]


def _distinct(results: Iterable[SearchResult]) -> list[SearchResult]:
    """Drops results with the same cells as an earlier one, as for sizes without effect."""
    distinct: dict[tuple[str, ...], SearchResult] = {}
    for result in results:
        ids = [outcome.id for outcome in result.outcomes]
        distinct.setdefault(tuple(ids), result)
    return list(distinct.values())


def _record(results: Sequence[SearchResult]) -> None:
    """Writes to the history which cells belong to a search, for the tuning curve of the report."""
    for result in results:
        base, search = result.search.base, result.search
        keys = {word: re.split("[/@=]", word.lstrip("+~"))[0] for word in search.fixed}
        words = [w for w, key in keys.items() if in_identity(key) or key == "experiment"]
        cells = [outcome.id for outcome in result.outcomes if _has_ended(outcome)]
        entry = SearchEntry(search.title, words, list(search.space.keys), result.metric.name, cells)
        study_dir = Path(base["runs_dir"]) / search.study
        if cells and entry not in read_entries(study_dir):
            append_entry(study_dir, entry)


def print_table(results: Sequence[SearchResult]) -> None:
    """Prints the best point of each search, warnings, and commands that repeat the best."""
    console = open_console()
    labels = dict.fromkeys(result.metric.label for result in results)
    heads = ["search", "best", "points", f"{' or '.join(labels)}, search seeds"]
    heads += ["fresh seeds, mean [95 % interval]", "n"]
    rows = [[result.search.title, *_cells(result)] for result in results]
    console.print(text_table(heads, rows))
    warnings = [line for result in results for line in _warnings(result)]
    best = [f"  {result.search.command(result.best[0])}" for result in results if result.best]
    fresh = [result.fresh for result in results if result.fresh and _has_ended(result.fresh)]
    for line in [*warnings, *(["to repeat the best:", *best] if best else [])]:
        console.out(line)
    if fresh:
        console.out("the fresh seeds compared:")
    for command in commands_to_look(fresh):
        console.out(f"  {command}")


def _cells(result: SearchResult) -> list[str]:
    counts = Counter(outcome.status for outcome in result.outcomes)
    lost = [f"{counts[name]} {name}" for name in ("failed", "refused") if counts[name]]
    count = ", ".join([str(len(result.outcomes)), *lost])
    if result.best is None:
        return ["none finished", count, "-", "-", "0"]
    (point, value), metric = result.best, result.metric
    shown = f"{metric.scale * value:.{metric.digits}f}"
    return [" ".join(words_of(point)), count, shown, *_fresh(result)]


def _fresh(result: SearchResult) -> list[str]:
    """The main metric over the fresh seeds, and their number."""
    outcome = result.fresh
    if outcome is None or not _has_ended(outcome):
        return ["; ".join(outcome.failures) if outcome is not None else "-", "0"]
    name = choose_metric({name for run in outcome.results for name in run.metrics}, None)
    if name is None:
        return ["all diverged", "0"]
    metric = describe_metric(name)
    runs = outcome.results
    finished = [run for run in runs if run.status == "finished" and name in run.metrics]
    values = [metric.scale * run.metrics[name] for run in finished]
    step = None
    if name == "test/accuracy":  # as in the report
        counts = (count_samples(seed_dir(outcome.directory, run.seed)) for run in finished)
        num_samples = max(counts, default=0)
        step = metric.scale / num_samples if num_samples else None
    interval = mean(values, step=step, bounds=metric.bounds)
    stamp = "INVALID " if outcome.invalid else ""
    lost = len(runs) - len(finished)
    count = f"{len(finished)}, {lost} diverged" if lost else str(len(finished))
    return [f"{stamp}{metric.label} {format_interval(interval, metric.digits)}", count]


def _warnings(result: SearchResult) -> list[str]:
    search, best = result.search, result.best
    if best is None:
        return [f"{search.title}: no point has a value; see the lines above"]
    study, point = search.base["study"], best[0]
    folder = Path(search.base["runs_dir"]) / study
    others = [
        f"{search.title}: study={study} also has runs at {' '.join(words_of(other))}, another "
        "point of this search; the result above does not include them"
        for other, outcome in zip(search.points, result.outcomes, strict=True)
        if other != point and (folder / outcome.id).is_dir()
    ]
    return others + [
        f"{search.title}: the best {dimension.key}={point[dimension.key]} lies at the edge of what "
        "was searched; a wider range may be better"
        for dimension in search.space.dimensions
        if dimension.is_at_edge(point[dimension.key])
    ]
