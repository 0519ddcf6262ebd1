"""One ended run: the content of its result.json, schema 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.files import read_json, write_json
from normexp.records.paths import RESULT_FILE, list_seeds, seed_dir

SCHEMA = 1


class Status(StrEnum):
    """The state of a run."""

    FINISHED = "finished"
    DIVERGED = "diverged"  # finished, with a loss that is not finite
    FAILED = "failed"
    RUNNING = "running"
    INTERRUPTED = "interrupted"  # with a checkpoint
    NOT_STARTED = "not started"
    UNREADABLE = "unreadable"


ENDED = (Status.FINISHED, Status.DIVERGED)  # runs that no command trains again


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
        timing: train_seconds, step_ms of one optimizer step of the whole stack, stack_size,
            samples_per_second; on a GPU also peak_memory_mb of the whole stack, in 10^6 bytes.
        invalid: why the numbers must not be compared, such as a model that reads future tokens.
        apart: why the run was trained apart from its stack: its last digits may differ.
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
    apart: str | None = None
    stopped: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON: metrics sorted by name, missing values absent."""
        metrics = {name: float(self.metrics[name]) for name in sorted(self.metrics)}
        content = {"schema": SCHEMA} | vars(self) | {"metrics": metrics, "status": str(self.status)}
        return {name: value for name, value in content.items() if value is not None}


def write_result(run_dir: Path, result: Result) -> None:
    """Writes result.json atomically. Write it last: its presence means that the run has ended."""
    write_json(run_dir / RESULT_FILE, result.to_dict())


def read_result(path: Path) -> Result:
    """Reads a result.

    Args:
        path: result.json, or the run directory that holds it.

    Raises:
        UserError: a missing, torn or foreign file, or one that was edited by hand.
    """
    path = path / RESULT_FILE if path.is_dir() else path
    if not path.exists():
        read_json(path)  # raises
    stat = path.stat()
    return _read(path, stat.st_ino, stat.st_mtime_ns)


@cache  # a study is read every second while it is trained
def _read(path: Path, _inode: int, _time: int) -> Result:
    return result_of(read_json(path), path)


def result_of(content: dict[str, Any], path: Path) -> Result:
    """The result that `to_dict` made these values of. Raises UserError, naming the file."""
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise UserError(
            f"{path}: schema={schema!r}, this normexp reads schema={SCHEMA}; move the file away, "
            "or take another study=..."
        )
    try:
        content["status"] = Status(content["status"])
        return Result(**content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} was edited by hand: {error}; remove it, and the same command trains the run "
            "again"
        ) from error


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
        before, now = _loaded(result.config), _loaded(config)
        for name in before if result.status != Status.FAILED else ():
            if None not in (before[name], now[name]) and before[name] != now[name]:
                raise UserError(
                    f"{name} is not what the recorded runs of {cell_dir} were trained with; "
                    "train in a study of its own: study=..."
                )


def _loaded(config: Mapping[str, Any]) -> dict[str, str | None]:
    """The recorded digests of what a training has loaded, by name."""
    recipe = config.get("recipe", {})
    return {
        "the data set": recipe.get("data", {}).get("digest"),
        "model.weights": recipe.get("model", {}).get("weights_digest"),
    }


def values_of(results: Sequence[Result], name: str) -> list[float]:
    """The values of a metric over the runs that have it."""
    return [result.metrics[name] for result in results if name in result.metrics]


def hyperparameters(config: Mapping[str, Any], **names: str | None) -> dict[str, Any]:
    """A result's config for dashboards: with `names`, and with a number for each null size."""
    micro = config["micro_batch_size"] or config["batch_size"]
    sizes = {"micro_batch_size": micro, "norm_batch_size": config["norm_batch_size"] or micro}
    return {**config, **sizes, "recipe": {**config.get("recipe", {}), **sizes}, **names}
