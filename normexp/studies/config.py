"""The config of one cell from its overrides; nothing is written and no torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from normexp.errors import UserError
from normexp.studies.composing import (
    choice_texts,
    compose,
    compose_choices,
    is_choice,
    parse_overrides,
    without_hydra,
)
from normexp.studies.folders import GROUPS
from normexp.studies.kinds import refuse_type_change
from normexp.studies.refusals import refuse_lone_sweep, refuse_other_target


def compose_config(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """The config of one cell, without Hydra's own part.

    Args:
        overrides: `key=value` texts as on the command line, one value per key.
        config_dirs: folders of the user's own YAMLs, beside the shipped ones.

    Raises:
        UserError: unknown choice or key, a text that cannot be read, a value of another type.
    """
    return compose_cell(overrides, config_dirs)[0]


def compose_cell(
    overrides: Sequence[str], config_dirs: Sequence[str] = ()
) -> tuple[DictConfig, dict[str, str]]:
    """As `compose_config`, with the name chosen in each config group: {"norm": "batch", ...}."""
    parsed = parse_overrides(overrides)
    for override in parsed:
        refuse_lone_sweep(override)
    config = compose(overrides, config_dirs)
    names = config.hydra.runtime.choices
    choices = {group: str(names[group]) for group in GROUPS if names.get(group) is not None}
    values = _plain(without_hydra(config))
    defaults = _plain(compose_choices(choice_texts(overrides), tuple(config_dirs)))
    for override in parsed:
        if not is_choice(override) and not override.is_delete():
            key = override.key_or_group
            refuse_type_change(key, _select(defaults, key), _select(values, key))
            refuse_other_target(key, _select(defaults, key), choices)
    if isinstance(config.get("study"), int | float):  # study=2026 names a folder
        config.study = str(config.study)
    return config, choices


def _plain(config: DictConfig) -> Any:
    """All values, resolved. Raises UserError for an interpolation that leads nowhere."""
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from error


def _select(tree: Any, key: str) -> Any:
    """The value at a dotted key of a tree of dicts; None where there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
