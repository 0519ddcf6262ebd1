"""What a search prints: a line per trial, then its best points with fresh seeds behind them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.reporting.metric import choose_metric, describe_metric
from normexp.reporting.numbers import format_interval
from normexp.stats import mean
from normexp.studies.outcome import Outcome
from normexp.studies.tuning_search import Search, Trial

WIDTH = 200  # of a log file, which has no edge


@dataclass(frozen=True)
class Row:
    """A search with its best trial and the outcome of the fresh seeds; None where there is none.

    reported_before: earlier bests that have fresh seeds of their own in the same study.
    """

    search: Search
    best: Trial | None
    outcome: Outcome | None
    reported_before: Sequence[Trial] = ()

    @property
    def is_reported(self) -> bool:
        return self.outcome is not None and self.outcome.status in ("finished", "skipped")


def tell(search: Search, trial: Trial, value: float | None, error: str) -> None:
    """One line on stderr as soon as a trial has ended."""
    best = search.best()
    shown = "stopped early" if value is None else f"{search.objective.name} {value:.4f}"
    if error:
        shown = f"failed: {error}"
    so_far = "" if best is None else f" (best {best.value:.4f} at {_words(best.point)})"
    place = f"trial {len(search.ended())}/{search.target}"
    print(f"{search.plan.title}  {place}  {_words(trial.point)}  {shown}{so_far}", file=sys.stderr)


def print_table(rows: Sequence[Row]) -> None:
    """Searches with their best values, the lines that repeat them, and warnings."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    objectives = {row.search.objective.name: row.search.objective for row in rows}
    validation = " or ".join(objective.metric.label for objective in objectives.values())
    table = Table("search", "best", "trials", f"{validation}, search seeds", box=None)
    table.add_column("fresh seeds, mean [95 % interval]")
    table.add_column("n")
    for row in rows:
        table.add_row(*map(Text, [row.search.plan.title, *_cells(row)]))
    console.print(table)
    for row in rows:
        for line in _warnings(row):
            console.print(line, markup=False, soft_wrap=True)
    lines = [row.search.plan.command(row.best.point) for row in rows if row.best is not None]
    if lines:
        console.print("the same again:")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _cells(row: Row) -> list[str]:
    counts = Counter(trial.state for trial in row.search.ended())
    marks = {"pruned": "stopped early", "fail": "failed"}
    notes = [f"{counts[state]} {word}" for state, word in marks.items() if counts[state]]
    trials = ", ".join([str(len(row.search.ended())), *notes])
    if row.best is None or row.best.value is None:
        return ["none finished", trials, "-", "-", "0"]
    metric = row.search.objective.metric
    value = f"{metric.scale * row.best.value:.{metric.digits}f}"
    return [_words(row.best.point), trials, value, *_reported(row)]


def _reported(row: Row) -> list[str]:
    if row.outcome is None or not row.is_reported:
        return [row.outcome.error if row.outcome is not None else "-", "0"]
    available = {name for result in row.outcome.results for name in result.metrics}
    name = choose_metric(available, None)
    if name is None:
        return ["all diverged", "0"]
    metric = describe_metric(name)
    finished = [r for r in row.outcome.results if r.status == "finished" and name in r.metrics]
    interval = mean([metric.scale * result.metrics[name] for result in finished])
    stamp = "INVALID " if row.outcome.invalid else ""
    lost = len(row.outcome.results) - len(finished)
    count = f"{len(finished)}, {lost} diverged" if lost else str(len(finished))
    return [f"{stamp}{metric.label} {format_interval(interval, metric.digits)}", count]


def _warnings(row: Row) -> list[str]:
    if row.best is None:
        return [f"{row.search.plan.title}: no trial has a value; see the lines above"]
    plan = row.search.plan
    earlier = [
        f"{plan.title}: study={plan.base.study} also has the fresh seeds of {_words(trial.point)}, "
        "the best of fewer trials; they are no part of the result above"
        for trial in row.reported_before
    ]
    return earlier + [
        f"{plan.title}: the best {d.key}={row.best.point[d.key]} lies at the edge of "
        f"{d.describe()}; a wider one may be better"
        for d in plan.space.edges(row.best.point)
    ]


def _words(point: dict[str, str]) -> str:
    return " ".join(f"{key}={text}" for key, text in point.items())
