"""The median rule for trials: thresholds by epoch, and what a trial reached at each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from normexp.records.metrics import read_metrics
from normexp.records.paths import METRICS_FILE, seed_dir
from normexp.search.objective import Objective
from normexp.search.search import Trial

TRIALS_BEFORE = 5  # that are complete before any is ended early


def median_thresholds(trials: Sequence[Trial]) -> dict[int, float]:
    """Epoch to the median over complete trials, the last epoch aside; empty while there are few.

    A trial whose best value so far is worse is ended, as by Optuna's MedianPruner; known before
    the training begins, so that any process can apply it.
    """
    complete = [trial.by_epoch for trial in trials if trial.state == "complete"]
    if len(complete) < TRIALS_BEFORE:
        return {}
    epochs = sorted({epoch for values in complete for epoch in values})
    return {
        epoch: statistics.median(values[epoch] for values in complete if epoch in values)
        for epoch in epochs[:-1]
    }


def read_by_epoch(directory: Path, seeds: Sequence[int], objective: Objective) -> dict[int, float]:
    """Epoch to the mean of the objective over seeds, from each run's metrics.csv.

    A seed that lacks an epoch which another has was diverged there.
    """
    rows: list[dict[int, float]] = []
    for seed in seeds:
        path = seed_dir(directory, seed) / METRICS_FILE
        found = read_metrics(path) if path.is_file() else []
        rows.append({row.epoch: row.value for row in found if row.name == objective.name})
    epochs = sorted({epoch for values in rows for epoch in values})
    return {epoch: objective.mean([values.get(epoch) for values in rows]) for epoch in epochs}
