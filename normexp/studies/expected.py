"""How long a training will take, from the recorded timings of trainings like it. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from normexp.errors import UserError
from normexp.records.layout import Study
from normexp.records.reader import read_result
from normexp.records.result import Result
from normexp.studies.outcome import Outcome

# What a training is compared by, the closest likeness first.
LIKENESSES = (
    ("model", "data", "norm", "batch_size", "micro_batch_size", "norm_batch_size"),
    ("model", "data", "norm", "batch_size"),
    ("model", "data", "batch_size"),
)


def read_timed(study_dir: Path) -> list[Result]:
    """The runs of a study that have a timing; what cannot be read is passed over."""
    timed = []
    for run_dir in Study(study_dir).list_runs():
        try:
            result = read_result(run_dir)
        except UserError:
            continue
        if result.timing.get("step_ms") and result.timing.get("stack_size"):
            timed.append(result)
    return timed


def expected_seconds(planned: Outcome, timed: Sequence[Result]) -> float | None:
    """Seconds of training for the missing runs of a cell; None where nothing like it is recorded.

    The median time of a step of one replica among the likest runs, times steps and replicas.
    """
    for keys in LIKENESSES:
        like = [
            run.timing["step_ms"] / run.timing["stack_size"]
            for run in timed
            if all(run.config.get(key) == planned.record.get(key) for key in keys)
        ]
        if like:
            steps = planned.record["num_steps"] * len(planned.missing)
            return statistics.median(like) * steps / 1000
    return None
