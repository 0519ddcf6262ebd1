"""Composes the config of one cell, in plain values.

Hydra composes the choices of the groups, once for all cells that share them; the values of a line
are then set, and every key is checked to be one that something reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from normexp.config.choices import compose_choices, explain, is_choice, parse_overrides
from normexp.config.groups import CUSTOM_GROUPS, GROUPS, group_choices
from normexp.config.keys import BUDGETS, MISSING, is_read
from normexp.config.trees import dotted_keys, parts_with_target, value_at
from normexp.config.validate import unknown_key
from normexp.errors import UserError
from normexp.records.source import why_missing
from normexp.words import as_typed

# Defaults of keys that must be typed now, each an example. Recorded ids leave them out.
FORMER_DEFAULTS = {"model.name": "resnet18"}


def compose_config(words: Sequence[str]) -> dict[str, Any]:
    """The config of one cell; see `compose_cell`."""
    return compose_cell(words)[0]


def compose_cell(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of one cell, and its choice in each config group: {"norm": "batch", ...}.

    No DictConfig goes further: interpolations are resolved, and `???` stands for a missing value.

    Args:
        words: `key=value` of a command line, one value per key.

    Raises:
        UserError: an unknown choice or key, a word that cannot be read.
    """
    parsed = parse_overrides(words)
    for one in parsed:
        if one.is_sweep_override():
            raise UserError(f"{one.input_line} names several values: add -m, or quote a text")
    tree = dict(compose_choices(parsed))
    choices = tree.pop("hydra")["runtime"]["choices"]
    config, known = OmegaConf.create(tree), [key for key in dotted_keys(tree) if is_read(key)]
    typed = {one.get_key_element().lstrip("+"): one for one in parsed if not is_choice(one)}
    for key, one in typed.items():
        group, _, name = key.partition(".")
        is_open = choices.get(group) == "custom" or key.startswith("logger.custom.")
        if name == "_target_" and value_at(tree, key) not in (None, MISSING):
            # Records would name it for another class.
            raise UserError(f"{key}: {group}={choices[group]} has one; add {group}=custom")
        if not (key in known or is_open or one.is_add() or one.is_force_add()):
            choice = f"{group}={choices[group]}" if choices.get(group) else ""
            raise unknown_key(key, known, choice)
        OmegaConf.update(config, key, one.value(), merge=False, force_add=True)
    for key in ("runs_dir", "data_dir"):
        if isinstance(config[key], str):
            config[key] = os.path.expanduser(config[key])
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {explain(error)}") from error
    recipe = choices.get("experiment")
    if "experiment" in plain:
        raise UserError(f"experiment={recipe}: its YAML must begin with `# @package _global_`")
    plain = {"logger": {}} | plain | {"experiment": recipe}  # for the loggers
    for key in dotted_keys(plain):
        if not is_read(key):
            raise unknown_key(key, known)
    chosen = [key for key in BUDGETS if key != "epochs" or key in typed]  # epochs has a default
    budgets = [key for key in chosen if plain[key] is not None]
    if len(budgets) > 1:  # one would win unseen
        given = " and ".join(f"{key}={as_typed(plain[key])}" for key in budgets)
        raise UserError(f"{given}: a training has one budget; keep one, or type {budgets[-1]}=null")
    names = {group: str(name) for group in GROUPS if (name := choices.get(group)) is not None}
    own = [group for group in names if names[group] == "custom" and group != "logger"]
    return plain, names | {group: _name_of(group, plain[group]) for group in own}


def _name_of(group: str, values: Mapping[str, Any]) -> str:
    """The name of a user's own part: `my_package.load_stripes` is stripes.

    A name that a shipped choice has too is kept in full.
    """
    target = str(values.get("_target_", MISSING)).replace(MISSING, "custom")
    name = target.rpartition(".")[2].removeprefix("load_")
    return target if name in group_choices(group) else name


def refuse_missing(config: Mapping[str, Any]) -> None:
    """Raises UserError for a missing value, a missing class of the user, or a missing logger."""
    refuse_missing_values(config)
    for group in CUSTOM_GROUPS:
        for part in parts_with_target(config.get(group)):
            if reason := why_missing(part["_target_"]):
                raise UserError(f"{group}._target_={part['_target_']}: {reason}")
    for name in ("wandb", "tensorboard", "mlflow"):
        if name in config["logger"] and find_spec(name) is None:
            raise UserError(f"logger={name} needs its package; pip install {name}")


def refuse_missing_values(tree: Mapping[str, Any], prefix: str = "") -> None:
    """Raises UserError for a `???` in a config, or in its part at the dotted key `prefix`."""
    for key in dotted_keys(tree):
        if value_at(tree, key) == MISSING:
            example = FORMER_DEFAULTS.get(f"{prefix}{key}", "...")
            raise UserError(f"{prefix}{key} is not set; give {prefix}{key}={example}")
