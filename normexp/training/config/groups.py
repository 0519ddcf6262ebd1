"""The config groups, their shipped choices, and the values in the shipped YAMLs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

PARTS = ("norm", "model", "data", "optim")  # ids name the choice of each
OPTIONAL_GROUPS = ("schedule", "callback")  # ids need not name them
CUSTOM_GROUPS = (*PARTS, *OPTIONAL_GROUPS)  # take `<group>=custom <group>._target_=...`
GROUPS = (*CUSTOM_GROUPS, "trainer", "logger", "experiment")


def conf_dir() -> Path:
    """The folder of the shipped YAMLs: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"normexp is installed without its conf folder (beside {package})")


def group_choices(group: str, folder: Path | None = None) -> list[str]:
    """The names that `group=` takes, sorted; those of another folder of YAMLs, if given."""
    folder = (folder or conf_dir()) / group
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.yaml")]
    names = {file.as_posix() for file in files}
    return sorted(names - {"claims"})  # conf/experiment/claims.yaml is read and not trained


@lru_cache(maxsize=256)
def shipped_defaults(group: str, choice: str) -> dict[str, Any] | None:
    """The values in conf/<group>/<choice>.yaml; None for a choice that normexp does not ship."""
    if choice not in group_choices(group):
        return None
    tree = _read(conf_dir() / group / f"{choice}.yaml")
    return tree["data"] if group == "data" else tree  # data files also set top-level keys


@lru_cache(maxsize=8)
def shipped_targets(group: str) -> dict[str, str]:
    """Maps each class in the shipped YAMLs of a group to its choice, the first of several."""
    targets: dict[str, str] = {}
    for choice in group_choices(group):
        if values := shipped_defaults(group, choice):
            targets.setdefault(values["_target_"], f"{group}/{choice}")
    return targets


def shipped_values(group: str, target: str) -> dict[str, Any] | None:
    """The values in the YAML of a shipped class; None for any other class."""
    choice = shipped_targets(group).get(target)
    return None if choice is None else shipped_defaults(*choice.split("/", 1))


def ships(group: str, choice: str | None, target: str) -> bool:
    """True for a class that the YAML of a shipped choice names."""
    values = shipped_defaults(group, choice) if choice else None
    if values is None:
        return False
    return any(part["_target_"] == target for part in parts_with_target(values))


def parts_with_target(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a config, at any depth, that has a `_target_`."""
    if isinstance(tree, dict):
        if isinstance(tree.get("_target_"), str):
            yield tree
        tree = list(tree.values())
    for value in tree if isinstance(tree, list) else ():
        yield from parts_with_target(value)


@lru_cache(maxsize=1)
def shipped_config() -> dict[str, Any]:
    """The values in conf/config.yaml."""
    tree = _read(conf_dir() / "config.yaml")
    return {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}


def option_defaults(entry: str) -> dict[str, Any]:
    """The default of each key of an entry without a config; ??? if the key must be given."""
    return _read(conf_dir() / "entries.yaml")[entry]


def _read(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf  # slow to import, and --help does without

    tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    return tree
