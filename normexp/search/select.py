"""Trains the points of searches, chooses on validation, and trains fresh seeds at the best."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from normexp.config.spec import CellSpec, join_points
from normexp.errors import FAILED, UserError
from normexp.records.result import Status
from normexp.records.study import CellState, read_cell
from normexp.reporting.metric import Metric, describe_metric
from normexp.reporting.terminal import open_console, print_closing_table, text_table
from normexp.search.points import VALIDATION, Point, Search, words_of
from normexp.sweeps.sweep import raise_if_stopped, run_cells, train_cells


def tune(searches: Sequence[Search], words: Sequence[str]) -> int:
    """Searches, trains fresh seeds at the best points, prints both; returns the exit code.

    Raises:
        UserError: all points are refused, or no run has the metric.
        Halted, KeyboardInterrupt: as `raise_if_stopped`.
    """
    base = searches[0].base
    cells = join_points([cell for search in searches for _, cell in search.trials])
    if base["dry_run"]:
        return run_cells([*cells, *join_points([*map(_planned_report, searches)])], words)
    states = _train(searches[0], cells, words)
    if all(state.refused for state in states.values()):
        raise UserError(next(iter(states.values())).refused)
    lost = not all(map(_has_ended, states.values()))
    if lost and base["fail_fast"]:
        print("fail_fast: the search ends here, and no fresh seeds are trained", file=sys.stderr)
        return FAILED
    chosen, rows = list[CellSpec](), list[list[str]]()
    for search in searches:
        metric, known = _metric_of(search, states), _points_with_a_value(search, states)
        count = f"{len(known)} of {len(search.trials)}"
        if not known:
            rows.append([search.title, "none", count, "-"])
            continue
        value, best = known[0]
        shown = f"{metric.scale * value:.{metric.digits}f} {metric.label}"
        rows.append([search.title, " ".join(words_of(best)), count, shown])
        chosen.append(search.cell(best, is_report=True))
    fresh = _train(searches[0], join_points(chosen), words) if chosen else {}
    console = open_console()
    console.print(text_table(["search", "best", "points with a value", "search seeds"], rows))
    console.out("fresh seeds at the best points:")
    print_closing_table([*fresh.values()])
    is_whole = len(chosen) == len(searches) and all(map(_has_ended, fresh.values()))
    return FAILED if lost or not is_whole else 0


def _points_with_a_value(
    search: Search, states: Mapping[str, CellState]
) -> list[tuple[float, Point]]:
    """The ended points of a search with their validation means, the best first."""
    metric = _metric_of(search, states)
    means = [
        (metric.mean_over(states[cell.id].results), point)
        for point, cell in search.trials
        if _has_ended(states[cell.id])
    ]
    known = [pair for pair in means if pair[0] != metric.worst]
    return sorted(known, key=lambda pair: pair[0], reverse=metric.higher_is_better)


def _planned_report(search: Search) -> CellSpec:
    """The cell of the fresh seeds: at the best point, or at any while the search has not ended."""
    cells = [cell for _, cell in search.trials]
    states = {
        cell.id: read_cell(cell.study_dir, cell.id, cell.title, cell.seeds, []) for cell in cells
    }
    known = _points_with_a_value(search, states)
    if known and all(map(_has_ended, states.values())):
        return search.cell(known[0][1], is_report=True)
    words = [*search.fixed, *(f"{key}=best" for key in search.space.keys)]
    return replace(search.cell(search.trials[0][0], is_report=True), overrides=words)


def _train(search: Search, cells: Sequence[CellSpec], words: Sequence[str]) -> dict[str, CellState]:
    """The state of each cell of a search, or of several from one command, by id."""
    states = train_cells(cells, words, command=search.command, searched=search.space.keys)
    raise_if_stopped(cells, states)
    return {state.id: state for state in states}


def _has_ended(state: CellState) -> bool:
    """True if all runs of a cell finished or diverged."""
    return state.status in ("finished", "skipped", "diverged")


def _metric_of(search: Search, states: Mapping[str, CellState]) -> Metric:
    """The metric `tune.metric`, or the first of VALIDATION that the runs have.

    Raises:
        UserError: no finished run has `tune.metric`.
    """
    asked = search.base["tune"]["metric"]
    runs = [run for state in states.values() for run in state.results]
    known = {name for run in runs if run.status == Status.FINISHED for name in run.metrics}
    if asked is not None and known and asked not in known:
        near = ", ".join(sorted(name for name in known if name.startswith("val/")))
        raise UserError(f"tune.metric={asked}: no run has this metric; try {near}")
    return describe_metric(
        asked or next((name for name in VALIDATION if name in known), VALIDATION[-1])
    )
