"""Trains the points of searches, chooses on validation, and trains fresh seeds at the best."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from normexp.errors import FAILED, UserError
from normexp.training.config.spec import CellSpec, join_points
from normexp.training.records.result import Status
from normexp.training.records.study import CellState, read_cell
from normexp.training.search.points import Point, Search, overrides_of
from normexp.training.studies.terminal import print_closing_table
from normexp.training.sweeps.sweep import raise_if_stopped, run_cells, train_cells
from normexp.verdicts.metric import OF_VALIDATION, Metric, describe_metric
from normexp.verdicts.terminal import open_console, print_rows


def tune(searches: Sequence[Search], words: Sequence[str]) -> int:
    """Searches, trains fresh seeds at the best points, prints both; returns the exit code.

    Raises:
        UserError: all points are refused, or no run has the metric.
        Halted, KeyboardInterrupt: as `raise_if_stopped`.
    """
    base = searches[0].base
    cells = join_points([cell for search in searches for _, cell in search.trials])
    if base["dry_run"]:
        planned = join_points([_planned_report(search) for search in searches])
        return run_cells([*cells, *planned], words)
    states = _train(searches[0], cells, words)
    if all(state.refused for state in states.values()):
        raise UserError(next(iter(states.values())).refused)
    has_searched = all(map(_has_ended, states.values()))
    if not has_searched and base["fail_fast"]:
        print("fail_fast: the search ends here, and no fresh seeds are trained", file=sys.stderr)
        return FAILED
    ranked = [(search, _points_with_a_value(search, states)) for search in searches]
    best_cells = []
    for search, points in ranked:
        if points:
            _, best = points[0]
            best_cells.append(search.cell(best, is_report=True))
    fresh = _train(searches[0], join_points(best_cells), words) if best_cells else {}
    console = open_console()
    titles = ["search", "best", "points with a result", "mean of the search seeds"]
    rows = [_row_of(search, points, states) for search, points in ranked]
    print_rows(console, titles, rows)
    for search, points in ranked:
        state = states[search.trials[0][1].id]
        if not points and (reason := "; ".join(filter(None, [state.refused, *state.failures]))):
            console.print(f"{search.title}: {reason}")
    if fresh:
        console.out("fresh seeds at the best points:")
        print_closing_table([*fresh.values()])
    has_reported = len(best_cells) == len(searches) and all(map(_has_ended, fresh.values()))
    return 0 if has_searched and has_reported else FAILED


def _row_of(
    search: Search, points: Sequence[tuple[float, Point]], states: Mapping[str, CellState]
) -> list[str]:
    """A search, its best point, the number of points with a value, and the value of the best."""
    count = f"{len(points)} of {len(search.trials)}"
    if not points:
        return [search.title, "none", count, "-"]
    mean, best = points[0]
    metric = _metric_of(search, states)
    score = f"{metric.scale * mean:.{metric.digits}f} {metric.label}"
    return [search.title, " ".join(f"{key}={text}" for key, text in best.items()), count, score]


def _points_with_a_value(
    search: Search, states: Mapping[str, CellState]
) -> list[tuple[float, Point]]:
    """The ended points of a search with their validation means, the best first."""
    metric = _metric_of(search, states)
    points = []
    for point, cell in search.trials:
        state = states[cell.id]
        if not _has_ended(state):
            continue
        mean = metric.mean_over(
            run.metrics.get(metric.name) if run.status == Status.FINISHED else None
            for run in state.results
        )
        if mean != metric.worst:
            points.append((mean, point))
    return sorted(points, key=itemgetter(0), reverse=metric.higher_is_better)


def _planned_report(search: Search) -> CellSpec:
    """The cell of the fresh seeds: at the best point, or at any while the search has not ended."""
    states = {}
    for _, cell in search.trials:
        states[cell.id] = read_cell(cell.study_dir, cell.id, cell.request, [])
    points = _points_with_a_value(search, states)
    if points and all(map(_has_ended, states.values())):
        return search.cell(points[0][1], is_report=True)
    best = overrides_of(dict.fromkeys(search.space.keys, "best"))
    cell = search.cell(search.trials[0][0], is_report=True)
    return replace(cell, overrides=[*search.fixed, *best])


def _train(search: Search, cells: Sequence[CellSpec], words: Sequence[str]) -> dict[str, CellState]:
    """The state of each cell of a search, or of several from one command, by id."""
    states = train_cells(cells, words, command=search.command, searched=search.space.keys)
    raise_if_stopped(cells, states)
    return {state.id: state for state in states}


def _has_ended(state: CellState) -> bool:
    """True if all runs of a cell finished or diverged."""
    return state.status in ("finished", "skipped", "diverged")


def _metric_of(search: Search, states: Mapping[str, CellState]) -> Metric:
    """The metric `tune.metric`, or the first of OF_VALIDATION that the runs have.

    Raises:
        UserError: no finished run has `tune.metric`.
    """
    metric = search.base["tune"]["metric"]
    recorded = set[str]()
    for state in states.values():
        for run in state.results:
            if run.status == Status.FINISHED:
                recorded |= run.metrics.keys()
    if metric is not None and recorded and metric not in recorded:
        names = ", ".join(sorted(name for name in recorded if name.startswith("val/")))
        raise UserError(f"tune.metric={metric}: no run has this metric; try {names}")
    first = next((name for name in OF_VALIDATION if name in recorded), OF_VALIDATION[-1])
    return describe_metric(metric or first)
