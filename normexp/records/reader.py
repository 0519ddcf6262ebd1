"""Reading a study back: results, rows for a table, and clear words where a file is not ours."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.records.layout import RESULT_FILE, Study, seed_of
from normexp.records.result import SCHEMA, Result


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
