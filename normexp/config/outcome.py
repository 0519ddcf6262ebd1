"""What came of a cell of a command, and what its folder already holds. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join
from typing import Any

from normexp.batching.sizes import SIZES
from normexp.config.help import option_defaults
from normexp.config.rules import as_typed
from normexp.config.spec import CellSpec, norm_and_data
from normexp.records.files import is_held
from normexp.records.paths import LOCK_FILE, WEIGHTS_FILE, seed_dir
from normexp.records.result import (
    DONE,
    CellRecords,
    Result,
    Status,
    has_evaluations,
    read_records,
)
from normexp.records.stacks import list_stacks

logger = logging.getLogger(__name__)


@dataclass
class Outcome:
    """The outcome of one cell of a command; plain values that travel between processes.

    Attributes:
        title: norm and data, as in the closing table.
        cell_id: of the cell.
        description: the `config` of its results; {} without one.
        results: those of its recorded runs, in order of seeds.
        missing: the seeds still to train.
        seconds: wall-clock time of its training.
        step_seconds: a first estimate of an optimizer step of one run; of a planned cell, 0: none.
        memory: the least bytes that it needs, besides those of torch itself; of a planned cell.
        halts: no other cell can be trained either, because the disk is full.
    """

    status: Status
    title: str
    cell_id: str = ""
    directory: Path | None = None
    description: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    error: str = ""
    invalid: str | None = None
    missing: list[int] = field(default_factory=list)
    seconds: float = 0.0
    memory: int = 0
    step_seconds: float = 0.0
    halts: bool = False


def recorded_outcome(spec: CellSpec, status: Status, error: str = "") -> Outcome:
    """The outcome of a cell, with its results. It has failed if one of its runs has.

    Raises:
        UserError: a result that cannot be read.
    """
    records = records_of(spec)
    if status in DONE and records.failed:
        status, error = Status.FAILED, error or _last_failure(spec, records)
    outcome = Outcome(status, norm_and_data(spec), spec.id, spec.directory, error=error)
    outcome.results, outcome.missing = records.all, missing_seeds(spec)
    if records.all:
        outcome.description, outcome.invalid = records.all[0].config, records.all[0].invalid
    return outcome


def records_of(spec: CellSpec) -> CellRecords:
    """The results of the seeds of a cell. Raises UserError for one that cannot be read."""
    return read_records(spec.directory, spec.seeds)


def missing_seeds(spec: CellSpec) -> list[int]:
    """The seeds to train: without a result, or failed less often than the command tries."""
    return records_of(spec).missing(
        retry_failed=spec.values["retry_failed"], max_attempts=spec.values["max_attempts"]
    )


def is_recorded(spec: CellSpec) -> bool:
    """True if no seed is missing, and nothing has to be tidied that a killed process left.

    Raises:
        UserError: a result that cannot be read.
    """
    if missing_seeds(spec):
        return False
    lock = spec.directory / LOCK_FILE
    if lock.exists():
        return is_held(lock)
    study_dir = spec.directory.parent
    return not any(
        all(stack.has_ended(study_dir, member) for member in stack.members)
        for stack in list_stacks(study_dir, [spec.id])
    )


def _last_failure(spec: CellSpec, records: CellRecords) -> str:
    """The error of a failed run that is not retried, and how to retry it."""
    attempts = max(run.attempts for run in records.failed)
    remedy = f"max_attempts={attempts + 1}" if spec.values["retry_failed"] else "retry_failed=true"
    return f"{records.failed[0].error} (attempt {attempts}; {remedy} tries again)"


# --- Evaluations ---------------------------------------------------------------------------------


def evaluations_of(spec: CellSpec, trained: Mapping[str, Any]) -> dict[str, int]:
    """What evaluation.json must hold as `asked`, see `has_evaluations`.

    Args:
        trained: the `config` of a result of the cell; its sizes count devices.
    """
    config, statistics = spec.values, spec.values["evaluate_with"]
    pooled = ("precise", "own_share")
    asked = {kind: config["precise_samples"] for kind in pooled if kind in statistics}
    if "batch" not in statistics:
        return asked
    norm = next(size for key in reversed(SIZES) if (size := trained[key]) is not None)
    return asked | {f"batch{size}": size for size in config["evaluate_batch_sizes"] or [norm]}


def suggest_evaluation(spec: CellSpec) -> None:
    """If recorded runs lack requested evaluations, logs the command that adds them."""
    config, directory, runs = spec.values, spec.directory, records_of(spec).ended
    if not runs or has_evaluations(directory, runs, evaluations_of(spec, runs[0].config)):
        return
    if not any((seed_dir(directory, seed) / WEIGHTS_FILE).is_file() for seed in spec.seeds):
        logger.info("recorded without these statistics, and without weights to measure them from")
        return
    words = [f"run={directory}", f"evaluate_with={as_typed(config['evaluate_with'])}"]
    for key in ("precise_samples", "evaluate_batch_sizes"):
        if config[key] != option_defaults("evaluate")[key]:
            words.append(f"{key}={as_typed(config[key])}")
    logger.info(
        "recorded without these statistics; to add them: python -m normexp.evaluate %s",
        join(words),
    )
