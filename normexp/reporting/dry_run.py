"""What a dry run prints: runs to do, time, memory, and the differences a report could detect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from normexp.config.outcome import Outcome
from normexp.config.rules import format_count
from normexp.config.spec import CellSpec, format_duration
from normexp.errors import UserError
from normexp.records.history import words_on_added_seeds
from normexp.records.paths import STUDY_FILE, list_runs
from normexp.records.result import Result, Status, read_result
from normexp.reporting.cells import build_cells
from normexp.reporting.model import AXIS_WORDS, RunRow
from normexp.reporting.read import StudyRecords, run_row
from normexp.reporting.slices import build_slices
from normexp.reporting.summary import by_cell
from normexp.reporting.terminal import open_console, text_table
from normexp.reporting.verdict import Comparison, compare
from normexp.stats.family import MAX_SEEDS, seeds_for, smallest_difference, spread_of

MIB = 2**20
SPREAD_ALIKE = ("model", "data", "num_steps")  # trainings that have about the same spread
MOST_LINES = 12  # of differences
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
    for study_dir, outcomes_of_study in planned.items():
        added = words_on_added_seeds(study_dir, {o.cell_id: _seeds(o) for o in outcomes_of_study})
        lines.append(added or power_words(outcomes_of_study, read(study_dir)))
    console = open_console()
    if rows:
        heads = ("cell", "runs to do", "done", "steps", "time", "memory")
        console.print(text_table(heads, rows))
    for line in filter(None, lines):
        console.out(line)


def _seeds(outcome: Outcome) -> list[int]:
    return [*(run.seed for run in outcome.results), *outcome.missing]


def _find_seconds(
    outcome: Outcome, study_dir: Path, read: Callable[[Path], list[RunRow]]
) -> float | None:
    """Expected time of a cell's missing runs, from its own study, else from the other studies."""
    count = len(outcome.missing)
    expected = (
        expected_seconds(outcome.description, count, _timed(read(study_dir))) if count else 0.0
    )
    if expected is None:
        others = (file.parent for file in study_dir.parent.glob(f"*/{STUDY_FILE}"))
        runs = [run for other in others if other != study_dir for run in _timed(read(other))]
        expected = expected_seconds(outcome.description, count, runs)
    return expected


def read_runs(study_dir: Path) -> list[RunRow]:
    """The ended runs of a study; unreadable ones are skipped."""
    runs = []
    for run_dir in list_runs(study_dir):
        with suppress(UserError):
            runs.append(run_row(study_dir.name, run_dir, read_result(run_dir)))
    return runs


def _timed(runs: Sequence[RunRow]) -> list[Result]:
    results = [run.result for run in runs]
    return [run for run in results if run.timing.get("step_ms") and run.timing.get("stack_size")]


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


def power_words(planned: Sequence[Outcome], recorded: Sequence[RunRow]) -> str:
    """The smallest differences that a report on the planned cells would detect, in words.

    Each difference goes by its own recorded spread, over seeds and test samples: of the planned
    cells, else of the same norms and sizes in other trainings. Empty if the report would compare
    nothing.
    """
    tested = [one for one in _compared(_planned_runs(planned)) if one.is_judged]
    if not tested:
        return ""
    size, n = family_size(planned), max(len(o.results) + len(o.missing) for o in planned)
    named = f"smallest difference called in 80 % of studies, {format_count(n, 'seed')} and "
    named += f"{format_count(size, 'verdict')}"
    if n < 2:
        return f"{named}: none, as one seed has no spread; set replicas=..."
    known = _compared(recorded)
    spreads = [(one, _most_alike(one, known)) for one in tested]
    lines = [_power_line(one, like, n, size) for one, like in spreads if like is not None]
    if not lines:
        times = smallest_difference(n, 1.0, size)
        return (
            f"{named}: {times:.2g} times the standard deviation over seeds of a difference, which "
            "is unknown until two seeds of both its cells are recorded"
        )
    lines = [line for _, line in sorted(lines, reverse=True)]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} that are smaller"]
    if unknown := len(tested) - sum(like is not None for _, like in spreads):
        lines.append(
            f"{format_count(unknown, 'difference')} unknown until two seeds of both cells are "
            "recorded"
        )
    return "\n  ".join([f"{named}, by the spread of each so far:", *lines])


def _power_line(
    planned: Comparison, like: Comparison, n: int, family_size: int
) -> tuple[float, str]:
    """The smallest difference, and the line that shows it.

    `batch, norm batch size 2 and 128: 0.52 points (spread of 3 seeds); 1 point takes 5 seeds`
    """
    sd, of_samples = spread_of(like.gap) or (math.inf, 0.0)
    least = smallest_difference(n, sd, family_size, of_samples)
    needed = seeds_for(like.margin, sd, family_size, of_samples)
    takes = f"takes {needed} seeds" if needed else f"would not show with {MAX_SEEDS} seeds"
    metric, axis, (small, large) = like.part.metric, AXIS_WORDS[like.part.axis], planned.sizes
    unlike = ", of trainings unlike these" * (not _is_alike(planned, like))
    name = f"{planned.first.norm}, {axis} {small} and {large}"
    if not planned.is_along_sizes:
        name = f"{planned.first.norm} and {planned.second.norm} at {axis} {small}"
    where = f" at {planned.budget}" if planned.change else ""
    return least, (
        f"{name}{where}: {metric.amount_words(least)} (spread of {like.gap.n} seeds{unlike}); "
        f"{metric.amount_words(like.margin)} {takes}"
    )


def _most_alike(planned: Comparison, known: Sequence[Comparison]) -> Comparison | None:
    """The recorded difference of the same norms and sizes that is most like the planned one."""

    def ends(comparison: Comparison) -> Hashable:
        names = (comparison.first.name, comparison.second.name)
        return comparison.part.axis, names, comparison.sizes

    def rank(one: Comparison) -> tuple[bool, bool]:
        return _is_alike(planned, one), one.ends == planned.ends

    same = [
        one for one in known if ends(one) == ends(planned) and spread_of(one.gap) and not one.unlike
    ]
    return max(same, key=rank, default=None)


def _is_alike(planned: Comparison, recorded: Comparison) -> bool:
    return all(
        planned.first.config.get(key) == recorded.first.config.get(key) for key in SPREAD_ALIKE
    )


def _compared(runs: Sequence[RunRow]) -> list[Comparison]:
    """Every difference of a report on these runs."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.study, set()).add(run.seed)
    counts = {study: len(known) for study, known in seeds.items()}
    return compare(
        build_slices(build_cells(StudyRecords(runs, counts)), metric=None, tolerance=None)
    )


def _planned_runs(planned: Sequence[Outcome]) -> list[RunRow]:
    """One run without metrics for each cell."""
    records = {f"{o.cell_id} {o.description}": o.description for o in planned}
    return [
        run_row("", Path(str(number), "seed-0"), Result("", 0, Status.FINISHED, record, {}, {}))
        for number, record in enumerate(records.values())
    ]


def family_size(planned: Sequence[Outcome]) -> int:
    """How many tests a report on the cells would make if every run finished."""
    sizes = [one.family_size for one in _compared(_planned_runs(planned)) if one.is_judged]
    return max(sizes, default=0)
