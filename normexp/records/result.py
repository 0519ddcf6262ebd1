"""What one run came to: the content of result.json, schema 1."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from normexp.errors import UserError
from normexp.records.files import write_json
from normexp.records.paths import CHECKPOINT_FILE, MEMBERS_FILE, RESULT_FILE, Study, seed_of

SCHEMA = 1
Status = Literal["finished", "diverged", "failed"]
OPTIONAL = ("diverged_at_step", "error", "num_parameters", "timing", "invalid", "attempts")


@dataclass(frozen=True)
class Result:
    """One ended run, (cell, seed). What is not known is absent: None or an empty dict here.

    Attributes:
        config: plain values: norm, model, data, sizes, lr, epochs and so on.
        metrics: name (`val/accuracy`) to a finite number; a metric without a value has no name.
        diverged_at_step: the optimizer step whose loss was not finite; only where diverged.
        error: one line; only, and always, where failed.
        timing: train_seconds, step_ms of one optimizer step of the whole stack, stack_size,
            samples_per_second; on a GPU peak_memory_mb of the whole stack, in 10^6 bytes.
        invalid: why no number here may be compared, as of a language model that reads the future.
        attempts: how often the run has failed so far; only where failed.

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
    num_parameters: int | None = None
    timing: dict[str, float] = field(default_factory=dict)
    invalid: str | None = None
    attempts: int | None = None

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            known = ", ".join(get_args(Status))
            raise ValueError(f"status={self.status!r} is not one of {known}")
        if (self.diverged_at_step is not None) != (self.status == "diverged"):
            raise ValueError("diverged_at_step goes with status diverged, and with no other")
        if (self.error is not None) != (self.status == "failed"):
            raise ValueError("error goes with status failed, and with no other")
        if self.attempts is not None and (self.status != "failed" or self.attempts < 1):
            raise ValueError("attempts, from 1, goes with status failed, and with no other")
        for group in (self.metrics, self.timing):
            for name, value in group.items():
                _require_finite(name, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: schema first, metrics by name, absent where missing."""
        content = {"schema": SCHEMA} | {
            part.name: getattr(self, part.name) for part in fields(self)
        }
        content["metrics"] = {name: float(self.metrics[name]) for name in sorted(self.metrics)}
        return {key: value for key, value in content.items() if not _is_missing(key, value)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Result:
        """The result in a parsed result.json; ValueError says what is wrong with it."""
        names = {part.name for part in fields(cls)}
        missing = sorted(names - set(OPTIONAL) - set(content))
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
        unknown = sorted(set(content) - names - {"schema"})
        if unknown:
            raise ValueError(f"unknown key {', '.join(unknown)}")
        for name in ("config", "metrics", "environment", "timing"):
            if not isinstance(content.get(name, {}), dict):
                raise ValueError(f"{name} is not a mapping")
        if type(content["seed"]) is not int:
            raise ValueError(f"seed={content['seed']!r} is not an integer")
        return cls(**{name: content[name] for name in names & set(content)})


def _is_missing(key: str, value: Any) -> bool:
    return key in OPTIONAL and (value is None or value == {})


def _require_finite(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not a finite number; leave it out where missing")


def read_result(path: Path) -> Result:
    """The result of a run; `path` is result.json or the run directory it lies in.

    Raises:
        UserError: no such file, torn JSON, another schema, a foreign file, or one edited by hand.
    """
    path = path / RESULT_FILE if path.is_dir() else path
    content = read_json(path)
    schema = content.get("schema")
    if schema is None:
        raise UserError(f"{path} is not a result of normexp: it has no schema; move it away")
    if schema != SCHEMA:
        raise UserError(
            f"{path} has schema {schema!r}, this normexp reads {SCHEMA}; "
            "use the normexp that wrote it, or another study=..."
        )
    try:
        return Result.from_dict(content)
    except ValueError as error:
        raise UserError(f"{path} was edited by hand: {error}; {_remedy(path)}") from error


def read_run(run_dir: Path) -> Result:
    """As `read_result`, of a run directory that must be the one that the result names.

    Raises:
        UserError: as `read_result`; or the result of another run.
    """
    result = read_result(run_dir)
    if (result.cell_id, result.seed) != (run_dir.parent.name, seed_of(run_dir)):
        named = f"{result.cell_id} seed {result.seed}"
        raise UserError(
            f"{run_dir} holds the result of {named}: was it moved or copied? "
            "Move it away; the run is then trained anew"
        )
    return result


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; UserError names the file and the remedy."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: the run has not ended; run it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise UserError(f"{path} is not valid JSON ({error}); {_remedy(path)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a file of normexp: it holds no object; move it away")
    return content


def read_runs(study_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Every ended run of a study as a flat row, and a line for every run without a readable result.

    A row has cell_id, seed and status; the config's values, nested keys joined by dots
    (`norm.num_groups`); the metrics by name; and diverged_at_step, error, num_parameters,
    `timing.*` and `environment.*` where there are any. What a run lacks is absent from its row.
    """
    rows, problems = [], []
    for run_dir in Study(study_dir).list_runs():
        try:
            rows.append(flatten_result(read_run(run_dir)))
        except UserError as error:
            problems.append(str(error))
    return rows, problems


def flatten_result(result: Result) -> dict[str, Any]:
    """One row of a table; where a config key has the name of a field, the field stands."""
    content = result.to_dict()
    del content["schema"]
    config, metrics = content.pop("config"), content.pop("metrics")
    own = _flatten(content)
    first = {key: own.pop(key) for key in ("cell_id", "seed", "status")}
    return first | {k: v for k, v in _flatten(config).items() if k not in first} | metrics | own


def find_study(runs_dir: Path, name: str) -> Path:
    """The directory of a study; UserError with the nearest names where there is none."""
    folders = [path for path in runs_dir.iterdir() if path.is_dir()] if runs_dir.is_dir() else []
    studies = [Study(path) for path in sorted(folders)]
    known = [study.name for study in studies if study.file.exists() or study.list_cells()]
    if name in known:
        return runs_dir / name
    if not known:
        raise UserError(f"study={name} not found: {runs_dir} has no studies yet; train one first")
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:5]
    raise UserError(f"study={name} not found in {runs_dir}; nearest: {', '.join(nearest)}")


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _remedy(path: Path) -> str:
    return f"remove {path} and run again: the run is trained anew"


Member = tuple[str, int]  # cell id and seed


def shared_dir(study_dir: Path, members: Iterable[Member]) -> Path:
    """The directory of a stack of these runs, in this order."""
    text = json.dumps([list(member) for member in members])
    return study_dir / "stacks" / hashlib.sha256(text.encode()).hexdigest()[:16]


def write_members(stack_dir: Path, members: Iterable[Member]) -> None:
    """Who trains in a stack; before it has a checkpoint."""
    write_json(stack_dir / MEMBERS_FILE, {"members": [list(member) for member in members]})


def interrupted_stacks(study_dir: Path) -> Iterator[tuple[Path, list[Member]]]:
    """The stacks of several cells that have a checkpoint, by name, with their members.

    Raises:
        UserError: a members.json that cannot be read.
    """
    for checkpoint in sorted(study_dir.glob(f"stacks/*/{CHECKPOINT_FILE}")):
        path = checkpoint.parent / MEMBERS_FILE
        try:
            members = [(str(cell_id), int(seed)) for cell_id, seed in read_json(path)["members"]]
        except (UserError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} cannot be read; remove its folder and run again") from error
        yield checkpoint.parent, members


def write_result(seed_dir: Path, result: Result) -> None:
    """result.json, the last file of a run: its presence means ended."""
    write_json(seed_dir / RESULT_FILE, result.to_dict())
