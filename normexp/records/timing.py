"""How long a training will take, from what similar ones took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.paths import Study
from normexp.records.result import Result, read_result

# Config keys that must agree for a recorded run to predict the time of a planned one; strictest
# first.
ALIKE = (
    ("model", "data", "norm", "batch_size", "micro_batch_size", "norm_batch_size"),
    ("model", "data", "norm", "batch_size"),
    ("model", "data", "batch_size"),
)


def read_timed(study_dir: Path) -> list[Result]:
    """The runs of a study that have a timing; unreadable ones are skipped."""
    timed = []
    for run_dir in Study(study_dir).list_runs():
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
    for keys in ALIKE:
        step_ms = [
            run.timing["step_ms"] / run.timing["stack_size"]
            for run in timed
            if all(run.config.get(key) == config.get(key) for key in keys)
        ]
        if step_ms:
            steps = config["num_steps"] * num_runs
            return statistics.median(step_ms) * steps / 1000
    return None
