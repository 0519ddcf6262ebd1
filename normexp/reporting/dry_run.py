"""What a dry run prints: runs to do, time, memory, and the differences a report could detect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from normexp.config.outcome import Outcome
from normexp.config.rules import format_count
from normexp.config.spec import CellSpec, format_duration
from normexp.errors import UserError
from normexp.records.paths import STUDY_FILE, list_runs
from normexp.records.result import Result, Status, read_result, values_of
from normexp.records.state import shared_words
from normexp.reporting.cells import build_cells
from normexp.reporting.metric import choose_metric, describe_metric
from normexp.reporting.read import StudyRecords, run_row
from normexp.reporting.slices import build_slices
from normexp.reporting.summary import by_cell
from normexp.reporting.terminal import open_console, text_table
from normexp.reporting.verdict import compare
from normexp.stats.family import seeds_for, smallest_difference

MIB = 2**20
ALIKE = ("model", "data", "num_steps")  # trainings whose spread over seeds may be compared
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
    read = cache(read_timed)
    planned: dict[Path, list[Outcome]] = {}  # by study
    seconds, rows, refused, has_guess = [], [], [], False
    for titles, outcome in by_cell(cells, outcomes):
        title = shared_words(titles) if len(cells) > 1 else outcome.title
        if outcome.directory is None:
            refused.append(f"{outcome.status}: {title}: {outcome.error}")
            continue
        planned.setdefault(outcome.directory.parent, []).append(outcome)
        expected = _find_seconds(outcome, outcome.directory.parent, read)
        if expected is None and outcome.step_seconds:
            has_guess = True
            expected = outcome.step_seconds * outcome.record["num_steps"] * len(outcome.missing)
        seconds.append(expected)
        rows.append([title, *_planned(outcome, seconds[-1])])
    num_runs = sum(
        len(outcome.missing)
        for outcomes_of_study in planned.values()
        for outcome in outcomes_of_study
    )
    cells_to_do = sum(bool(one.missing) for of_study in planned.values() for one in of_study)
    of_cells = f" of {format_count(cells_to_do, 'cell')}" if num_runs else ""
    todo = f"{format_count(num_runs, 'run')}{of_cells} to do"
    guess = " (a first estimate, by one step of each)" if has_guess else ""
    lines = [*refused, f"{todo}: {_total(seconds, num_workers)}{guess}"]
    lines += [
        power_words(outcomes_of_study, read(study_dir))
        for study_dir, outcomes_of_study in planned.items()
    ]
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
    expected = expected_seconds(outcome.record, count, read(study_dir)) if count else 0.0
    if expected is None:
        others = (file.parent for file in study_dir.parent.glob(f"*/{STUDY_FILE}"))
        runs = [run for other in others if other != study_dir for run in read(other)]
        expected = expected_seconds(outcome.record, count, runs)
    return expected


def read_timed(study_dir: Path) -> list[Result]:
    """The runs of a study that have a timing; unreadable ones are skipped."""
    timed = []
    for run_dir in list_runs(study_dir):
        try:
            result = read_result(run_dir)
        except UserError:
            continue
        if result.timing.get("step_ms") and result.timing.get("stack_size"):
            timed.append(result)
    return timed


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
    steps = f"{outcome.record['num_steps']:,}"
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


def power_words(planned: Sequence[Outcome], recorded: Sequence[Result]) -> str:
    """The smallest difference that a report on the planned cells would detect, in words.

    Also the number of seeds that detects one tolerance. Empty if the report would compare nothing.
    The spread is the mean variance over seeds of recorded cells, of equally long trainings if there
    are any; without one the difference is in units of it. A difference has twice that variance,
    because seeds count as unrelated between cells.
    """
    size, n = family_size(planned), max(len(o.results) + len(o.missing) for o in planned)
    if not size:
        return ""
    named = f"smallest difference called in 80 % of studies, {format_count(n, 'seed')} and "
    named += f"{format_count(size, 'verdict')}: "
    planned_settings = {tuple(outcome.record.get(key) for key in ALIKE) for outcome in planned}
    alike = [
        run for run in recorded if tuple(run.config.get(key) for key in ALIKE) in planned_settings
    ]
    name, sd = _spread(alike or recorded)
    if n < 2:
        return named + "none, as one seed has no spread; set replicas=..."
    if sd is None:
        times = smallest_difference(n, math.sqrt(2), size)
        return (
            f"{named}{times:.2g} times the standard deviation over seeds, which is unknown until "
            "two seeds of a cell are recorded and differ"
        )
    metric = describe_metric(name)
    sd *= metric.scale * math.sqrt(2)
    least, needed = smallest_difference(n, sd, size), seeds_for(metric.tolerance, sd, size)
    takes = f"{needed} seeds" if needed else "more than 1000 seeds"
    source = "recorded so far" if alike else "recorded so far, of trainings unlike these"
    return (
        f"{named}{least:.2g} {metric.unit}".rstrip()
        + f", by the spread {source}; {metric.tolerance_words} takes {takes}"
    )


def _spread(recorded: Sequence[Result]) -> tuple[str, float | None]:
    """The main metric, and its standard deviation over seeds; None without two that differ."""
    name = choose_metric({name for run in recorded for name in run.metrics}, None) or ""
    by_cell: dict[str, list[Result]] = {}
    for run in recorded:
        by_cell.setdefault(run.cell_id, []).append(run)
    values = [values_of(runs, name) for runs in by_cell.values()]
    variances = [statistics.variance(of_cell) for of_cell in values if len(of_cell) > 1]
    return name, math.sqrt(statistics.mean(variances)) if any(variances) else None


def family_size(planned: Sequence[Outcome]) -> int:
    """How many verdicts a report on the cells would have if every run finished."""
    records = {f"{outcome.cell_id} {outcome.record}": outcome.record for outcome in planned}
    runs = [
        run_row("", Path(str(number), "seed-0"), Result("", 0, Status.FINISHED, record, {}, {}))
        for number, record in enumerate(records.values())
    ]
    slices = build_slices(build_cells(StudyRecords(runs, {"": 1})), metric=None, tolerance=None)
    return sum(comparison.is_primary for comparison in compare(slices))
