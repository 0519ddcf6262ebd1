"""Finds recorded cells by a cache key, without preparing them and without torch.

The key of a cell is a digest of all that its results follow from: its composed config, the user's
own modules and data files, and normexp's source. When a cell is prepared, its key goes into the
history with its id. An equal key means an equal id, so that only the results must be looked for.
Another key proves nothing: the cell is prepared, and may still be recorded under its id.

None of the user's modules is imported: a target's file is found by its path, and the history lists
the files that were loaded when the cell was prepared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from normexp.config.compose import parts_with_target
from normexp.config.spec import CellSpec, Outcome, norm_and_data
from normexp.errors import UserError
from normexp.records.environment import code_version
from normexp.records.files import read_json
from normexp.records.history import CacheEntry, read_history
from normexp.records.identity import (
    digest_of_data,
    digest_of_source,
    digest_with_weights,
    loaded_sources,
    source_root,
)
from normexp.records.paths import EVALUATION_FILE, LOCK_FILE, seed_dir
from normexp.records.result import Result, read_records
from normexp.records.stacks import list_stacks

# Config keys that only say where and when a cell is trained; all others are part of the cache key.
NOT_IN_KEY = {
    *("seed", "replicas", "study", "runs_dir", "data_dir", "workers", "fail_fast", "retry_failed"),
    *("max_attempts", "dry_run", "logger", "tune", "experiment"),
    *("tags", "notes"),
}


# --- The key -------------------------------------------------------------------------------------


def cache_entry(
    spec: CellSpec, cell_id: str, files_digest: str | None, kinds: Mapping[str, int]
) -> CacheEntry | None:
    """The cache entry of a cell that has just been prepared; None if it cannot have one.

    Args:
        files_digest: computed before data and weights were loaded.
        kinds: as `EvaluationPlan.kinds`.
    """
    loaded = loaded_sources()
    key = _key_of(spec, files_digest, [*loaded], loaded)
    return None if key is None else CacheEntry(spec.digest, key, cell_id, [*loaded], dict(kinds))


def _key_of(
    spec: CellSpec,
    files_digest: str | None,
    sources: Sequence[str],
    loaded: Mapping[str, str] | None = None,
) -> str | None:
    """The cache key of a cell; None if it depends on more than known files.

    Args:
        sources: the user's own files and packages, besides those of the targets.
        loaded: digests of the sources that this process has loaded; others are read from disk.
    """
    config: Any = OmegaConf.to_container(spec.cfg, resolve=True)  # type: ignore[arg-type]
    config = {key: value for key, value in config.items() if key not in NOT_IN_KEY}
    config["data"].pop("data_dir", None)  # downloads are verified
    files = [_file_of(part["_target_"]) for part in parts_with_target(config)]
    if files_digest is None or None in files:
        return None
    roots = {*sources, *(str(root) for file in files if file and (root := source_root(file)))}
    on_disk = [root for root in sorted(roots) if Path(root).exists()]
    digests = {root: digest_of_source(Path(root)) for root in on_disk} | dict(loaded or {})
    content = [config, dict(spec.choices), code_version(), files_digest, digests]
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- The user's own modules ----------------------------------------------------------------------


def _file_of(target: str) -> Path | None:
    """The file of a target's top-level module; None if it has none, as a namespace package."""
    try:
        found = find_spec(target.partition(".")[0])  # of a top-level name: imports nothing
    except ValueError:  # __main__
        return None
    if found is None or not found.has_location or found.origin is None:
        return None
    return Path(found.origin)


# --- What is recorded ----------------------------------------------------------------------------


def find_skippable(specs: Sequence[CellSpec]) -> dict[int, Outcome]:
    """By position, the outcomes of cells with every requested result and evaluation."""
    read = cache(read_history)
    found: dict[int, Outcome] = {}
    for index, spec in enumerate(specs):
        if spec.cfg is None or spec.study_dir is None or spec.cfg.dry_run:
            continue
        entries = read(spec.study_dir).cache.get(spec.digest, [])
        entry = next((each for each in reversed(entries) if _is_current(spec, each)), None)
        if entry is None:
            continue
        with suppress(UserError):  # an unreadable result is reported once the cell is prepared
            outcome = recorded_outcome(spec, entry.cell_id)
            cell_dir = spec.study_dir / entry.cell_id
            is_evaluated = has_evaluations(cell_dir, outcome.results, entry.evaluated)
            if outcome.status == "skipped" and is_evaluated:
                found[index] = outcome
    return found


def _is_current(spec: CellSpec, entry: CacheEntry) -> bool:
    """True if the key is the same, and no process has, or left, a lock or a stack."""
    assert spec.study_dir is not None and spec.cfg is not None
    cell_dir = spec.study_dir / entry.cell_id
    if (cell_dir / LOCK_FILE).exists() or list_stacks(spec.study_dir, [entry.cell_id]):
        return False
    digest = digest_with_weights(digest_of_data(spec.cfg.data), spec.cfg.model)
    return _key_of(spec, digest, entry.sources) == entry.key


def has_evaluations(cell_dir: Path, runs: Sequence[Result], kinds: Mapping[str, int]) -> bool:
    """True if evaluation.json of each finished run has these kinds, see `EvaluationPlan.kinds`."""
    finished = [run.seed for run in runs if run.status == "finished"]
    files = [seed_dir(cell_dir, seed) / EVALUATION_FILE for seed in finished if kinds]
    return all(
        file.is_file() and kinds.items() <= read_json(file).get("asked", {}).items()
        for file in files
    )


def recorded_outcome(spec: CellSpec, cell_id: str) -> Outcome:
    """The outcome of a cell by its results: `skipped` if all are there, otherwise `failed`."""
    assert spec.study_dir is not None
    directory = spec.study_dir / cell_id
    records = read_records(directory, spec.seeds)
    status = "failed" if records.new or records.failed else "skipped"
    error = records.failed[0].error if records.failed else None
    outcome = Outcome(status, norm_and_data(spec), cell_id, directory, error=error or "")
    outcome.results, outcome.missing = records.all, records.new
    if records.all:
        first = records.all[0]
        outcome.record, outcome.invalid = first.config, first.invalid
    return outcome
