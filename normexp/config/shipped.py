"""The values in the shipped YAMLs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from normexp.config.groups import conf_dir, group_choices


@lru_cache(maxsize=256)
def shipped_defaults(group: str, choice: str) -> dict[str, Any] | None:
    """The values in conf/<group>/<choice>.yaml; None for a choice that normexp does not ship."""
    if choice not in group_choices(group):
        return None
    tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{choice}.yaml"))
    return tree["data"] if group == "data" else tree  # data files also set top-level keys


@lru_cache(maxsize=8)
def shipped_targets(group: str) -> dict[str, str]:
    """Maps each class in the shipped YAMLs of a group to its choice, the first of several."""
    values = {choice: shipped_defaults(group, choice) for choice in group_choices(group)[::-1]}
    return {part["_target_"]: f"{group}/{choice}" for choice, part in values.items() if part}


def shipped_values(group: str, target: str) -> dict[str, Any] | None:
    """The values in the YAML of a shipped class; None for any other class."""
    choice = shipped_targets(group).get(target)
    return None if choice is None else shipped_defaults(*choice.split("/", 1))


@lru_cache(maxsize=1)
def shipped_config() -> dict[str, Any]:
    """The values in conf/config.yaml."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    return {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
