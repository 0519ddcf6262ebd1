"""What in the records of a cell contradicts itself, so that no verdict may rest on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from normexp.errors import UserError
from normexp.records.metrics import fault_of
from normexp.records.paths import METRICS_FILE
from normexp.records.samples import read_samples
from normexp.reporting.model import ROUNDED, RunRow

LEAST = {"accuracy": 0.0, "loss": 0.0, "bits_per_byte": 0.0}  # of a recorded metric
GREATEST = {"accuracy": 1.0}


def doubts_of(runs: Sequence[RunRow]) -> list[str]:
    """One line for each contradiction in the records of a cell; runs: in order of seeds."""
    return [
        *(f"seed {run.seed}: {words}" for run in runs for words in _doubts_of_run(run)),
        *_copies(runs),
        *_versions(runs),
    ]


def _doubts_of_run(run: RunRow) -> Iterator[str]:
    for name, value in run.metrics.items():
        kind = name.partition("@")[0].rpartition("/")[2]
        if not LEAST.get(kind, -np.inf) <= value <= GREATEST.get(kind, np.inf):
            yield f"{name}={value:g} is outside the range of the metric"
    history = run.directory / METRICS_FILE
    has_curves = run.result.status == "finished" and history.is_file()
    if has_curves and (fault := fault_of(history, run.result.steps)):
        remedy = f"to train it again, remove {run.directory}"
        yield f"{METRICS_FILE} {fault}, so its curves are lost; {remedy}"
    samples = None
    with suppress(UserError):
        samples = read_samples(run.directory).get("running")
    recorded = run.metrics.get("test/accuracy")
    if samples is not None and samples.dtype == bool and recorded is not None:
        mean = float(samples.mean())
        if abs(mean - recorded) > ROUNDED * max(mean, recorded):
            yield f"result.json has test/accuracy={recorded:g}, samples.npz {mean:g}"


def _copies(runs: Sequence[RunRow]) -> Iterator[str]:
    """Runs with equal metrics and equal curves: two seeds never share every loss."""
    seen: dict[tuple[object, bytes], int] = {}
    for run in runs:
        path = run.directory / METRICS_FILE
        if run.result.status != "finished" or not path.is_file():
            continue
        key = (frozenset(run.result.metrics.items()), hashlib.sha256(path.read_bytes()).digest())
        if (first := seen.setdefault(key, run.seed)) != run.seed:
            yield f"seeds {first} and {run.seed} have the same metrics and curves"


def _versions(runs: Sequence[RunRow]) -> Iterator[str]:
    versions = {run.result.environment.get("code_version") for run in runs} - {None}
    if len(versions) > 1:
        yield f"its runs are of {len(versions)} versions of the code"
