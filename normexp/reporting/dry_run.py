"""What a dry run prints: cells, runs to do, time, and the smallest difference it could detect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from normexp.config.words import format_count, format_duration
from normexp.records.result import Status
from normexp.records.study import CellState
from normexp.reporting.metric import choose_metric, describe_metric
from normexp.reporting.terminal import Footnotes, open_console, titled_table
from normexp.stats.family import smallest_difference


@dataclass(frozen=True)
class Plan:
    """A cell of a dry run.

    Attributes:
        config: as its results will record it; {} if it was refused.
        step_seconds: a first estimate of an optimizer step of one run.
    """

    state: CellState
    config: dict[str, Any]
    step_seconds: float

    @property
    def seconds(self) -> float:
        """The training time of its missing runs, one after another."""
        return self.step_seconds * self.config["num_steps"] * len(self.state.missing)


def print_plan(plans: Sequence[Plan], *, num_workers: int, num_points: int) -> None:
    """Prints a row per cell, the totals, and the smallest difference that a report would detect."""
    console, footnotes, rows = open_console(), Footnotes(), []
    for plan in plans:
        state = plan.state
        if state.refused:
            rows.append([state.title, footnotes.mark(f"refused: {state.refused}"), "", "", ""])
            continue
        time = format_duration(plan.seconds) if state.missing else "-"
        done, steps = len(state.states) - len(state.missing), plan.config["num_steps"]
        rows.append([state.title, str(len(state.missing)), str(done), f"{steps:,}", time])
    console.print(titled_table(("cell", "runs to do", "done", "steps", "time"), rows))
    footnotes.print(console)
    if num_points > len(plans):
        console.out(f"{num_points} points of the grid, {format_count(len(plans), 'cell')}")
    known = [plan for plan in plans if not plan.state.refused]
    todo = [plan for plan in known if plan.state.missing]
    seconds, count = sum(plan.seconds for plan in todo), sum(len(p.state.missing) for p in todo)
    shared = seconds / max(1, min(num_workers, len(todo)))
    console.out(
        f"{format_count(count, 'run')} of {format_count(len(todo), 'cell')} to do: about "
        f"{format_duration(shared)}, by a few steps of each (a stack of small networks takes less)"
    )
    if len(known) > 1:
        console.out(_power(known))


def _power(plans: Sequence[Plan]) -> str:
    """The smallest difference between two cells that the study could detect, in words."""
    n, tests = min(len(plan.state.states) for plan in plans), len(plans) - 1
    named = f"smallest difference called in 80 % of studies, {format_count(n, 'seed')} and "
    named += format_count(tests, "comparison")
    if n < 2:
        return f"{named}: none, as one seed has no spread; set replicas=..."
    runs = [run for plan in plans for run in plan.state.results if run.status is Status.FINISHED]
    name = choose_metric({name for run in runs for name in run.metrics}, None)
    spread = None if name is None else _spread(plans, name)
    if name is None or spread is None:
        times = smallest_difference(n, 1.0, tests)
        return (
            f"{named}: {times:.2g} times the standard deviation over seeds of a difference, which "
            "is unknown until two seeds of two cells are recorded"
        )
    metric = describe_metric(name)
    least = metric.scale * smallest_difference(n, spread, tests)
    return f"{named}: {least:.{metric.digits}f} in {metric.label}, by the spread of the runs so far"


def _spread(plans: Sequence[Plan], metric: str) -> float | None:
    """The standard deviation over seeds of a difference of two cells, pooled over their pairs."""
    values = [
        {run.seed: run.metrics[metric] for run in plan.state.results if metric in run.metrics}
        for plan in plans
    ]
    variances = [
        statistics.variance([first[seed] - second[seed] for seed in shared])
        for first, second in combinations(values, 2)
        if len(shared := first.keys() & second.keys()) > 1
    ]
    return math.sqrt(statistics.mean(variances)) if variances else None
