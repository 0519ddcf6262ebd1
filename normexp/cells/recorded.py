"""Finds cells that need no training by what their results follow from, without torch.

The key of a cell is a digest of its composed config, the user's own modules, the user's data files
and normexp's own source. A cell that is prepared gets its key, and the history keeps it with the
cell's id. Where the key is the same, so is the id, and only the results must be looked for. Another
key says nothing: the cell is prepared, and may still be recorded under its id.

No user's module is imported: a target's file is found by its path, and the files that were loaded
when the cell was prepared are in the history.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from normexp.config.spec import CellSpec, Outcome, name_of
from normexp.errors import UserError
from normexp.records.environment import code_version
from normexp.records.history import KeyEntry, read_history
from normexp.records.identity import digest_of_source, source_root
from normexp.records.paths import EVALUATION_FILE, LOCK_FILE, seed_dir
from normexp.records.result import CellRecords, read_records
from normexp.records.stacks import list_stacks

# Top-level keys that say where and when a cell is trained; any other one is part of the key.
APART = {
    *("seed", "replicas", "study", "runs_dir", "data_dir", "workers", "fail_fast", "retry_failed"),
    *("max_attempts", "dry_run", "logger", "tune", "experiment"),
}
DATA_PATHS = ("root", "path")  # keys of shipped data sets that name the user's own files
DATA_PACKAGES = ("scikit-learn", "babel")  # they hold data sets
SMALL = (
    16 * 2**20
)  # bytes; the content of a larger file is not read, its size and time stand for it


class _UnknownSource(Exception):
    """What a cell follows from cannot be told without importing or loading it."""


# --- The key -------------------------------------------------------------------------------------


def key_entry(
    spec: CellSpec, cell_id: str, data_digest: str | None, *, evaluated: bool
) -> KeyEntry | None:
    """The key of a cell that has just been prepared; None if it cannot have one.

    Args:
        data_digest: `digest_of_data`, from before the data were loaded.
        evaluated: other statistics than the running averages were asked for.
    """
    sources = sorted(map(str, _loaded_sources()))
    try:
        key = _key_of(spec, sources, data_digest)
    except _UnknownSource:
        return None
    return KeyEntry(spec.digest, key, cell_id, sources, evaluated)


def digest_of_data(data: DictConfig | Mapping[str, Any]) -> str | None:
    """Digest of the user's own files that a data set is read from; None for a user's own loader.

    The content of a small text counts; of a large one, and in a folder of images, size and time.
    """
    if not str(data["_target_"]).startswith("normexp."):
        return None
    sha = hashlib.sha256(f"{sys.version_info[:3]}{_versions()}".encode())
    try:
        for path in (str(data[key]) for key in DATA_PATHS if data.get(key) is not None):
            for file in _files_below(path):
                sha.update(_describe_file(file, is_alone=file == path))
    except OSError:  # a file that has just gone
        return None
    return sha.hexdigest()[:16]


def _files_below(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    return sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
    )


def _describe_file(path: str, *, is_alone: bool) -> bytes:
    stat = os.stat(path)
    what: object = stat.st_mtime_ns
    if is_alone and stat.st_size <= SMALL:
        what = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return f"{path}\0{stat.st_size}\0{what}\0".encode()


@cache
def _versions() -> list[str]:
    found = []
    for name in DATA_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def _key_of(spec: CellSpec, sources: Sequence[str], data_digest: str | None) -> str:
    """Raises _UnknownSource if the key cannot be told."""
    config: Any = OmegaConf.to_container(spec.cfg, resolve=True)  # type: ignore[arg-type]
    config = {key: value for key, value in config.items() if key not in APART}
    config["data"].pop("data_dir", None)  # downloads are verified
    if data_digest is None:
        raise _UnknownSource
    roots = {*sources, *(str(root) for target in _targets(config) for root in _root_of(target))}
    digests = {root: digest_of_source(Path(root)) for root in sorted(roots) if Path(root).exists()}
    content = [config, dict(spec.choices), code_version(), data_digest, digests]
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _targets(tree: Any) -> Iterator[str]:
    """Everything in a config that names something to build."""
    if isinstance(tree, dict):
        if isinstance(tree.get("_target_"), str):
            yield tree["_target_"]
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _targets(value)


# --- The user's own modules ----------------------------------------------------------------------


def _root_of(target: str) -> list[Path]:
    """The user's own file or package that holds a target; none for an installed one.

    Raises:
        _UnknownSource: no such module, or one without a file.
    """
    first, *rest = target.split(".")
    try:
        found: ModuleSpec | None = find_spec(first)  # of a top-level name: imports nothing
    except ValueError:  # __main__
        found = None
    for name in rest:
        if found is None or found.submodule_search_locations is None:
            break
        inner = PathFinder.find_spec(f"{found.name}.{name}", found.submodule_search_locations)
        if inner is None:
            break
        found = inner
    if found is None or not found.has_location or found.origin is None:
        raise _UnknownSource
    root = source_root(Path(found.origin))
    return [] if root is None else [root]


def _loaded_sources() -> set[Path]:
    """The user's own files and packages among the modules that are loaded now."""
    outside = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    files = [vars(module).get("__file__") for module in [*sys.modules.values()]]
    own = [file for file in files if isinstance(file, str) and not file.startswith(outside)]
    return {root for file in own if (root := source_root(Path(file))) is not None}


# --- What is recorded ----------------------------------------------------------------------------


def passed_over(specs: Sequence[CellSpec]) -> dict[int, Outcome]:
    """The outcomes of the cells of which nothing is to be trained or told, by position."""
    read = cache(read_history)
    found: dict[int, Outcome] = {}
    for index, spec in enumerate(specs):
        if spec.cfg is None or spec.study_dir is None or spec.cfg.dry_run:
            continue
        entries = read(spec.study_dir).keys.get(spec.digest, [])
        entry = next((each for each in reversed(entries) if _is_current(spec, each)), None)
        if entry is None:
            continue
        with suppress(UserError):  # a result that cannot be read is told when it is prepared
            outcome = recorded_outcome(spec, entry.cell_id)
            if outcome.status == "skipped":
                found[index] = outcome
    return found


def _is_current(spec: CellSpec, entry: KeyEntry) -> bool:
    """True if the key still holds, the evaluations are there, and no process left anything."""
    assert spec.study_dir is not None and spec.cfg is not None
    cell_dir = spec.study_dir / entry.cell_id
    if entry.evaluated and not has_evaluations(cell_dir, spec.seeds):
        return False
    if (cell_dir / LOCK_FILE).exists() or list_stacks(spec.study_dir, [entry.cell_id]):
        return False
    try:
        return _key_of(spec, entry.sources, digest_of_data(spec.cfg.data)) == entry.key
    except _UnknownSource:
        return False


def has_evaluations(cell_dir: Path, seeds: Sequence[int]) -> bool:
    """True if each of these runs has an evaluation.json."""
    return all((seed_dir(cell_dir, seed) / EVALUATION_FILE).is_file() for seed in seeds)


def recorded_outcome(spec: CellSpec, cell_id: str) -> Outcome:
    """The outcome of a cell from its results: `skipped` if all are there, otherwise `failed`."""
    assert spec.study_dir is not None
    directory = spec.study_dir / cell_id
    records: CellRecords = read_records(directory, spec.seeds)
    error = (records.failed[0].error or "") if records.failed else ""
    is_whole = bool(spec.seeds) and not records.new and not records.failed
    results = records.all
    return Outcome(
        *("skipped" if is_whole else "failed", name_of(spec), cell_id, directory),
        record=results[0].config if results else {},
        results=results,
        error=error,
        invalid=results[0].invalid if results else None,
        missing=records.new,
    )
