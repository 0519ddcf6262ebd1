"""One ended run: the content of its result.json, schema 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.files import read_json, write_json
from normexp.records.paths import EVALUATION_FILE, RESULT_FILE, list_seeds, seed_dir, seed_of

SCHEMA = 1


class Status(StrEnum):
    """The state of a run, or the outcome of a cell for a command."""

    FINISHED = "finished"  # as an outcome: runs were trained
    DIVERGED = "diverged"  # finished, with a loss that is not finite
    FAILED = "failed"
    SKIPPED = "skipped"  # nothing was missing
    REFUSED = "refused"  # a mistake of the user
    STOPPED = "stopped"  # before its end
    PLANNED = "planned"  # in a dry run
    RUNNING = "running"
    INTERRUPTED = "interrupted"  # with a checkpoint
    NOT_STARTED = "not started"
    UNREADABLE = "unreadable"


ENDED = (Status.FINISHED, Status.DIVERGED)  # runs that no command trains again
RECORDED = (*ENDED, Status.FAILED)  # in a result.json
DONE = (Status.FINISHED, Status.SKIPPED)  # cells with all of their results


@dataclass(frozen=True)
class Result:
    """One ended run, (cell, seed). A missing value is None or an empty dict, and absent on disk.

    Attributes:
        config: plain values: norm, model, data, sizes, lr, epochs and so on.
        metrics: name, such as `val/accuracy`, to a finite number.
        diverged_at_step: first optimizer step whose loss was not finite; set if diverged.
        error: one line; set if failed.
        steps: optimizer steps that were made; fewer than planned only if it diverged or `stopped`.
        stopped: why a callback ended it before the planned steps.
        attempts: how often a failed run has been tried.
        timing: train_seconds, step_ms of one optimizer step of the whole stack, stack_size,
            samples_per_second; on a GPU also peak_memory_mb of the whole stack, in 10^6 bytes.
        invalid: why the numbers must not be compared, such as a model that reads future tokens.
        apart: why the run was trained apart from its stack: its last digits may differ.

    Raises:
        ValueError: an unknown status, a status without its reason, or a number that is not finite.
    """

    cell_id: str
    seed: int
    status: Status
    config: dict[str, Any]
    metrics: dict[str, float]
    environment: dict[str, Any]
    diverged_at_step: int | None = None
    error: str | None = None
    steps: int | None = None
    num_parameters: int | None = None
    timing: dict[str, float] = field(default_factory=dict)
    invalid: str | None = None
    attempts: int = 1
    apart: str | None = None
    stopped: str | None = None

    def __post_init__(self) -> None:
        if self.status not in RECORDED:
            raise ValueError(f"status={self.status!r} is not one of {', '.join(RECORDED)}")
        for name, status in (("diverged_at_step", Status.DIVERGED), ("error", Status.FAILED)):
            if (getattr(self, name) is None) == (self.status == status):
                raise ValueError(f"{name} must be set exactly if status={status}")
        for name in ("seed", "attempts"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name}={getattr(self, name)!r} is not an integer")
        for name in ("config", "metrics", "environment", "timing"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} is not a mapping")
        for name, value in {**self.metrics, **self.timing}.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise ValueError(f"{name}={value!r} is not a finite number; leave it out")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON: metrics sorted by name, missing values absent."""
        metrics = {name: float(self.metrics[name]) for name in sorted(self.metrics)}
        content = {"schema": SCHEMA} | vars(self) | {"metrics": metrics, "status": str(self.status)}
        absent = {name for name, value in content.items() if value is None}
        absent |= {"timing"} if not self.timing else set()
        absent |= {"attempts"} if self.status != Status.FAILED else set()
        return {name: value for name, value in content.items() if name not in absent}


def write_result(run_dir: Path, result: Result) -> None:
    """Writes result.json atomically. Write it last: its presence means that the run has ended."""
    write_json(run_dir / RESULT_FILE, result.to_dict())


def read_result(path: Path) -> Result:
    """Reads a result and checks that it belongs to its directory.

    Args:
        path: result.json, or the run directory that holds it.

    Raises:
        UserError: a missing, torn or foreign file, one that was edited by hand, or the result of
            another run.
    """
    path = path / RESULT_FILE if path.is_dir() else path
    run_dir, content = path.parent, read_json(path)
    again = "the same command trains the run again"
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise UserError(
            f"{path}: schema={schema!r}, this normexp reads schema={SCHEMA}; move the file away, "
            "or take another study=..."
        )
    try:
        if (status := content.get("status")) in RECORDED:
            content["status"] = Status(status)
        result = Result(**content)
    except (TypeError, ValueError) as error:  # TypeError: a key is missing or unknown
        raise UserError(f"{path} was edited by hand: {error}; remove it, and {again}") from error
    if (result.cell_id, result.seed) != (run_dir.parent.name, seed_of(run_dir)):
        raise UserError(
            f"{run_dir} holds the result of cell {result.cell_id}, seed {result.seed}: was it "
            f"moved or copied? Move it away, and {again}"
        )
    return result


def read_if_ended(run_dir: Path) -> Result | None:
    """The result of a run; None if it has not ended. Raises UserError as `read_result` does."""
    if run_dir.is_file():
        raise UserError(f"{run_dir} is a file, and must be the folder of a run; move it away")
    return read_result(run_dir) if (run_dir / RESULT_FILE).exists() else None


@dataclass(frozen=True)
class CellRecords:
    """The runs of a cell, in order of seeds.

    Attributes:
        ended: finished or diverged.
        failed: failed runs.
        new: the seeds without a result.
    """

    ended: list[Result]
    failed: list[Result]
    new: list[int]

    @property
    def all(self) -> list[Result]:
        return sorted(self.ended + self.failed, key=lambda result: result.seed)

    def missing(self, *, retry_failed: bool, max_attempts: int) -> list[int]:
        """The seeds to train: new ones, and failed ones that may be tried again."""
        again = [run.seed for run in self.failed if retry_failed and run.attempts < max_attempts]
        return sorted(self.new + again)


def read_records(cell_dir: Path, seeds: Sequence[int]) -> CellRecords:
    """Reads the results of these seeds. Raises UserError for one that cannot be read."""
    results = {seed: read_if_ended(seed_dir(cell_dir, seed)) for seed in seeds}
    known = [result for result in results.values() if result is not None]
    return CellRecords(
        ended=[result for result in known if result.status != Status.FAILED],
        failed=[result for result in known if result.status == Status.FAILED],
        new=[seed for seed, result in results.items() if result is None],
    )


def check_joins(cell_dir: Path, config: Mapping[str, Any]) -> None:
    """Refuses to add runs to a cell whose recorded runs had other data or weights.

    The id of a cell is of its config and the user's source; what was loaded is compared here.

    Args:
        config: of the new runs, as in their results.

    Raises:
        UserError: a digest differs; names the data set or the weights, and the remedy.
    """
    for seed in list_seeds(cell_dir):
        if not (seed_dir(cell_dir, seed) / RESULT_FILE).exists():
            continue
        result = read_result(seed_dir(cell_dir, seed))
        if result.status == Status.FAILED:  # will be replaced
            continue
        before, now = _loaded(result.config), _loaded(config)
        for name in before.keys() & now.keys():
            if before[name] != now[name]:
                raise UserError(
                    f"{name} is not what the recorded runs of {cell_dir} were trained with; "
                    "train in a study of its own: study=..."
                )


def _loaded(config: Mapping[str, Any]) -> dict[str, str]:
    """The recorded digests of what a training has loaded, by name."""
    recipe = config.get("recipe", {})
    digests = {
        "the data set": recipe.get("data", {}).get("digest"),
        "model.weights": recipe.get("model", {}).get("weights_digest"),
    }
    return {name: digest for name, digest in digests.items() if digest is not None}


def has_evaluations(cell_dir: Path, runs: Sequence[Result], asked: Mapping[str, int]) -> bool:
    """True if evaluation.json of each finished run has these kinds of statistics.

    Args:
        asked: `precise`, `own_share` or `batch<k>` to its number of samples. A norm that does not
            mix samples has the first alone.
    """
    for run in runs:
        if not run.config.get("mixes_samples", True):
            asked = {kind: count for kind, count in asked.items() if kind == "precise"}
        if run.status != Status.FINISHED or not asked:
            continue
        file = seed_dir(cell_dir, run.seed) / EVALUATION_FILE
        if not file.is_file() or not asked.items() <= read_json(file).get("asked", {}).items():
            return False
    return True


def values_of(results: Sequence[Result], name: str) -> list[float]:
    """The values of a metric over the runs that have it."""
    return [result.metrics[name] for result in results if name in result.metrics]


def hyperparameters(config: Mapping[str, Any], **names: str | None) -> dict[str, Any]:
    """A result's config for dashboards: with `names`, and with a number for each null size."""
    micro = config["micro_batch_size"] or config["batch_size"]
    sizes = {"micro_batch_size": micro, "norm_batch_size": config["norm_batch_size"] or micro}
    return {**config, **sizes, "recipe": {**config.get("recipe", {}), **sizes}, **names}
