"""What a dry run prints: runs to do, time, memory, and the differences a report could detect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from normexp.config.outcome import Outcome
from normexp.config.rules import format_count
from normexp.config.spec import CellSpec, format_duration
from normexp.errors import UserError
from normexp.records.paths import STUDY_FILE, list_runs
from normexp.records.result import Result, Status, read_result
from normexp.reporting.metric import choose_metric, describe_metric
from normexp.reporting.summary import by_cell
from normexp.reporting.terminal import open_console, text_table
from normexp.stats.family import smallest_difference

MIB = 2**20
# Config keys that must agree for a recorded run to predict the time of a planned one; strictest
# first.
TIMED_ALIKE = (
    ("model", "data", "norm", "batch_size", "micro_batch_size", "norm_batch_size"),
    ("model", "data", "norm", "batch_size"),
    ("model", "data", "batch_size"),
)


def print_plan(
    cells: Sequence[CellSpec], outcomes: Sequence[Outcome], *, num_workers: int = 1
) -> None:
    """Prints a row per cell, the totals, and the smallest difference that a report would detect."""
    read = cache(read_runs)
    planned: dict[Path, list[Outcome]] = {}  # by study
    seconds, rows, refused, has_guess = [], [], [], False
    for title, outcome in by_cell(cells, outcomes):
        title = title if len(cells) > 1 else outcome.title
        if outcome.directory is None:
            refused.append(f"{outcome.status}: {title}: {outcome.error}")
            continue
        planned.setdefault(outcome.directory.parent, []).append(outcome)
        expected = _find_seconds(outcome, outcome.directory.parent, read)
        if expected is None and outcome.step_seconds:
            has_guess = True
            expected = (
                outcome.step_seconds * outcome.description["num_steps"] * len(outcome.missing)
            )
        seconds.append(expected)
        rows.append([title, *_planned(outcome, seconds[-1])])
    num_runs = sum(
        len(outcome.missing)
        for outcomes_of_study in planned.values()
        for outcome in outcomes_of_study
    )
    cells_to_do = sum(bool(one.missing) for of_study in planned.values() for one in of_study)
    num_workers = min(num_workers, cells_to_do)  # one cell is trained by one
    of_cells = f" of {format_count(cells_to_do, 'cell')}" if num_runs else ""
    todo = f"{format_count(num_runs, 'run')}{of_cells} to do"
    guess = " (a first estimate, by a few steps of each)" if has_guess else ""
    lines = [*refused, f"{todo}: {_total(seconds, num_workers)}{guess}"]
    for outcomes_of_study in planned.values():
        lines.append(power_words(outcomes_of_study))
    console = open_console()
    if rows:
        heads = ("cell", "runs to do", "done", "steps", "time", "memory")
        console.print(text_table(heads, rows))
    for line in filter(None, lines):
        console.out(line)


def _find_seconds(
    outcome: Outcome, study_dir: Path, read: Callable[[Path], list[Result]]
) -> float | None:
    """Expected time of a cell's missing runs, from its own study, else from the other studies."""
    count = len(outcome.missing)
    expected = expected_seconds(outcome.description, count, read(study_dir)) if count else 0.0
    if expected is None:
        others = (file.parent for file in study_dir.parent.glob(f"*/{STUDY_FILE}"))
        runs = [run for other in others if other != study_dir for run in read(other)]
        expected = expected_seconds(outcome.description, count, runs)
    return expected


def read_runs(study_dir: Path) -> list[Result]:
    """The ended runs of a study with a time; unreadable ones are skipped."""
    runs = []
    for run_dir in list_runs(study_dir):
        with suppress(UserError):
            runs.append(read_result(run_dir))
    return [run for run in runs if run.timing.get("step_ms") and run.timing.get("stack_size")]


def expected_seconds(
    config: Mapping[str, Any], num_runs: int, timed: Sequence[Result]
) -> float | None:
    """Expected training time of some runs of a cell; None without a similar recorded run.

    Median step time per replica of the most similar runs, times steps and replicas.

    Args:
        config: of the cell, as its results will record it.
    """
    for keys in TIMED_ALIKE:
        step_ms = [
            run.timing["step_ms"] / run.timing["stack_size"]
            for run in timed
            if all(run.config.get(key) == config.get(key) for key in keys)
        ]
        if step_ms:
            steps = config["num_steps"] * num_runs
            return statistics.median(step_ms) * steps / 1000
    return None


def _planned(outcome: Outcome, seconds: float | None) -> list[str]:
    num_done = sum(run.status != "failed" for run in outcome.results)
    time = memory = "-"
    if outcome.missing:
        time = "unknown" if seconds is None else format_duration(seconds)
        memory = f"> {max(1, outcome.memory // MIB):,} MiB"
    steps = f"{outcome.description['num_steps']:,}"
    return [str(len(outcome.missing)), str(num_done), steps, time, memory]


def _total(seconds: Sequence[float | None], num_workers: int) -> str:
    """The time of all cells in words; with several workers at least that of the longest cell."""
    known = [cell_seconds for cell_seconds in seconds if cell_seconds is not None]
    parts = []
    if any(known) or len(known) == len(seconds):
        parts.append(f"{format_duration(sum(known))} of training")
    if any(known) and num_workers > 1:
        at_best = max(sum(known) / num_workers, *known)
        parts[0] += f", {format_duration(at_best)} in {num_workers} workers"
    if len(known) < len(seconds):
        cells = format_count(len(seconds) - len(known), "cell")
        parts.append(f"{cells} of unknown time until a similar training is recorded")
    return ", and ".join(parts)


def power_words(planned: Sequence[Outcome]) -> str:
    """The smallest difference between two cells that the study could detect, an estimate in words.

    By the spread over seeds of the runs so far; test samples add to it.
    """
    tests, n = len(planned) - 1, max(len(o.results) + len(o.missing) for o in planned)
    if tests < 1:
        return ""
    named = "estimate of the smallest difference called in 80 % of studies, "
    named += f"{format_count(n, 'seed')} and {format_count(tests, 'comparison')}"
    if n < 2:
        return f"{named}: none, as one seed has no spread; set replicas=..."
    runs = [run for one in planned for run in one.results if run.status == Status.FINISHED]
    name = choose_metric({name for run in runs for name in run.metrics}, None)
    spread = None if name is None else _spread(planned, name)
    if name is None or spread is None:
        times = smallest_difference(n, 1.0, tests)
        return (
            f"{named}: {times:.2g} times the standard deviation over seeds of a difference, which "
            "is unknown until two seeds of two cells are recorded"
        )
    metric = describe_metric(name)
    least = metric.scale * smallest_difference(n, spread, tests)
    return f"{named}: {least:.{metric.digits}f} {metric.unit}, by the spread of the runs so far"


def _spread(planned: Sequence[Outcome], metric: str) -> float | None:
    """The standard deviation over seeds of a difference of two cells, pooled over their pairs."""
    values = [
        {run.seed: run.metrics[metric] for run in one.results if metric in run.metrics}
        for one in planned
    ]
    variances = [
        statistics.variance([first[seed] - second[seed] for seed in shared])
        for first, second in combinations(values, 2)
        if len(shared := first.keys() & second.keys()) > 1
    ]
    return math.sqrt(statistics.mean(variances)) if variances else None
