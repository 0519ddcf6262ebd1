"""Which trainings are the same: the id of a cell, and digests of a user's own source.

A cell's config is a plain nested dict of everything that defines its training. `canonical` leaves
out what does not, so that two ways of saying one training give one id; `cell_id` names the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Top-level keys that do not change what is trained: who runs it, where, how it is watched.
NOT_TRAINING = (
    *("seed", "replicas", "study", "experiment", "dry_run", "hydra", "allow_leak"),
    *("workers", "fail_fast", "retry_failed", "max_attempts", "tune"),
    *("data_dir", "runs_dir", "save_weights", "chunk", "stack", "compile", "log_every"),
    *("logger", "diagnostics", "val_every_epochs"),
    *("evaluate_with", "evaluate_batch_sizes", "evaluate_every_epoch", "precise_samples"),
)
# The same inside `trainer`; its precision stays. Devices count in `norm_batch_size`: statistics of
# a device's share are those of a ghost sub-batch, so the two are one training.
PLACEMENT = ("accelerator", "devices", "num_nodes", "strategy")
# Inside `data`: caches never count, and where a file lies does not where a digest of it is known.
CACHES = ("data_dir", "cache_dir")
PATHS = ("path", "root")

MAX_LENGTH = 80  # characters of a cell id: readable in a listing, short enough for any file system
HASH_DIGITS = 10
NAME_LENGTH = 16


def canonical(config: Mapping[str, Any], *, mixes_samples: bool) -> dict[str, Any]:
    """The part of `config` that defines the training, in one spelling.

    A size becomes None where it reaches the next larger one, since nothing is split then; so does
    `norm_batch_size` for a norm that does not mix samples, measured by the caller.
    """
    kept = {key: value for key, value in config.items() if key not in NOT_TRAINING}
    kept["trainer"] = _without(kept.get("trainer") or {}, PLACEMENT) or None
    data = kept.get("data")
    if isinstance(data, Mapping):
        kept["data"] = _without(data, CACHES + (PATHS if data.get("digest") else ()))

    batch, micro = config["batch_size"], config.get("micro_batch_size")
    if micro is not None and micro >= batch:
        micro = None
    norm = config.get("norm_batch_size")
    if norm is not None and norm >= (micro or batch):
        norm = None
    kept["micro_batch_size"] = micro
    kept["norm_batch_size"] = norm if mixes_samples else None
    return kept


def cell_id(config: Mapping[str, Any]) -> str:
    """A readable slug and a hash: `group-convnet-digits-b32-m8-n4-lr0.1-0123456789`.

    The hash is of canonical JSON: sorted keys, numbers by value (0.10 is 0.1, 1.0 is 1); a
    top-level None is the same as an absent key. Lower case, safe as a file name, at most 80
    characters. `config` is what `canonical` returns.
    """
    plain = {key: value for key, value in _plain(config).items() if value is not None}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
    slug = "-".join(_slug_parts(plain))[: MAX_LENGTH - HASH_DIGITS - 1].rstrip("-._")
    return f"{slug}-{digest}" if slug else digest


def source_digest(module_file: Path) -> str | None:
    """A digest of a user's own module; None where it is part of normexp or of site-packages.

    A module inside a package stands for the whole package, helpers included.
    """
    path = module_file.resolve()
    if path.is_relative_to(Path(__file__).resolve().parents[1]) or is_installed(path):
        return None
    while (path.parent / "__init__.py").is_file():
        path = path.parent
    return digest_of_source(path)


def digest_of_source(path: Path) -> str:
    """16 hex digits of sha256: of a file's bytes, or of names and bytes of a folder's **/*.py."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    sha = hashlib.sha256()
    for file in sorted(path.rglob("*.py")):
        content = file.read_bytes()
        sha.update(f"{file.relative_to(path).as_posix()}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()[:16]


def is_installed(path: Path) -> bool:
    """Whether a source lies in site-packages, so that a version number stands for it."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _without(mapping: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def _plain(value: Any) -> Any:
    """Dicts with string keys, lists, and whole floats as ints: one value has one JSON text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _slug_parts(config: Mapping[str, Any]) -> list[str]:
    parts = [_label(config[key]) for key in ("norm", "model", "data") if key in config]
    sizes = {"b": "batch_size", "m": "micro_batch_size", "n": "norm_batch_size", "lr": "lr"}
    for prefix, key in sizes.items():
        value = config.get(key)
        if isinstance(value, int | float):
            parts.append(_safe(f"{prefix}{value:.6g}" if key == "lr" else f"{prefix}{value}"))
    return parts


def _label(part: Any) -> str:
    """A short name: a string itself, a mapping's `name`, or else the last part of its target.

    `normexp.norms.group.GroupNorm` is `group`, `normexp.data.digits.load` is `digits`.
    """
    if not isinstance(part, Mapping):
        return _safe(str(part))
    target = str(part.get("_target_", ""))
    module, _, last = target.rpartition(".")
    last = re.sub(r"^(load|build)_", "", last)
    if last in ("load", "build"):
        last = module.rpartition(".")[2]
    if target.startswith("normexp.norms."):
        last = "none" if last == "NoNorm" else last.replace("Norm", "") or last
    return _safe(str(part.get("name") or last))


def _safe(name: str) -> str:
    safe = re.sub(r"[^a-z0-9_.]+", "_", name.lower())[:NAME_LENGTH].strip("_.")
    return safe or "custom"
