"""Composes the config of one cell, in plain values.

Hydra composes the choices of the groups, once for all cells that share them; the values of a line
are then set, and every key is checked to be one that something reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from normexp.errors import UserError
from normexp.training.config.choices import (
    NEEDS_PACKAGE,
    compose_choices,
    is_choice,
    parse_overrides,
    user_error_of,
)
from normexp.training.config.groups import (
    CUSTOM_GROUPS,
    GROUPS,
    group_choices,
    parts_with_target,
    ships,
)
from normexp.training.config.keys import (
    MISSING,
    PATHS,
    dotted_keys,
    in_identity,
    is_read,
    value_at,
)
from normexp.training.config.validate import MOVED, unknown_key
from normexp.training.records.files import read_path
from normexp.training.records.source import why_missing
from normexp.verdicts.metric import direction_of
from normexp.verdicts.settings import BUDGETS
from normexp.words import as_typed

# Former defaults, which recorded ids leave out. Messages name them as examples.
FORMER_DEFAULTS = {"model.name": "resnet18", "callback.mode": "min"}

# For conf/callback/early_stopping.yaml.
OmegaConf.register_new_resolver("direction_of", lambda name: direction_of(str(name)), replace=True)


def compose_config(words: Sequence[str]) -> dict[str, Any]:
    """The config of one cell, from the words of its line; see `compose_cell`."""
    return compose_cell(parse_overrides(words))[0]


def compose_cell(overrides: Sequence[Override]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of one cell, and its choice in each config group: {"norm": "batch", ...}.

    No DictConfig goes further: interpolations are resolved, and `???` stands for a missing value.

    Args:
        overrides: of one point of a command's grid, so one value per key.

    Raises:
        UserError: an unknown choice or key, or several values.
    """
    for override in overrides:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line} names several values: add -m, or quote a text")
    composed = compose_choices(overrides)
    choices = composed.hydra["runtime"]["choices"]
    typed = {o.get_key_element().lstrip("+"): o for o in overrides if not is_choice(o)}
    known = [key for key in composed.keys if is_read(key)]
    config = deepcopy(composed.config)
    _set_values(config, typed, known, choices)
    plain = _resolved(config, choices.get("experiment"))
    _refuse_unread(plain, known)
    _refuse_two_budgets(plain, typed)
    return plain, _choices_by_name(plain, choices)


def _set_values(
    config: DictConfig,
    typed: Mapping[str, Override],
    known: Sequence[str],
    choices: Mapping[str, Any],
) -> None:
    """Sets what was typed, by its key; raises UserError for keys that are not `known`."""
    targets = {group: OmegaConf.select(config, f"{group}._target_") for group in CUSTOM_GROUPS}
    for key, override in typed.items():
        group = key.partition(".")[0]
        # A key that no YAML names is accepted only for a class of the user's own, or with a plus.
        takes_any = choices.get(group) == "custom" or key.startswith("logger.custom.")
        is_added = override.is_add() or override.is_force_add()
        if not (key in known or takes_any or is_added):
            choice = f"{group}={choices[group]}" if choices.get(group) else ""
            raise unknown_key(key, known, choice)
        if key == f"{group}._target_" and targets.get(group):
            # Records would name it for another class.
            raise UserError(f"{key}: {group}={choices[group]} has one; add {group}=custom")
        OmegaConf.update(config, key, override.value(), merge=False, force_add=True)


def _refuse_unread(plain: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuses what recipes and typed words set and nothing reads."""
    for key in plain:
        group, dot, name = key.partition(".")
        if dot:  # in YAML, `optim.momentum: 0.5` is one key of that name, which nothing reads
            raise UserError(f"{key}: a recipe nests its keys, as in {group}: {{{name}: ...}}")
    for key in dotted_keys(plain):
        if not is_read(key) or key in MOVED:
            raise unknown_key(key, known)


def _resolved(config: DictConfig, recipe: str | None) -> dict[str, Any]:
    """Plain values, with all interpolations resolved, and the name of the recipe for loggers."""
    try:
        _fill_in_paths(config)
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {user_error_of(error)}") from error
    if "experiment" in values:
        raise UserError(f"experiment={recipe}: {NEEDS_PACKAGE}")
    return {"logger": {}, **values, "experiment": recipe}


def _fill_in_paths(config: DictConfig) -> None:
    """Fills in `~`, `$NAME` and `${NAME}`; paths that ids count stay until they are read."""

    def as_variable(name: re.Match[str]) -> str:  # to OmegaConf, ${NAME} is a key of the config
        return name[0] if name[1] in config else f"${name[1]}"

    for key in PATHS:
        group, _, name = key.rpartition(".")
        values = OmegaConf.select(config, group) if group else config
        if values is not None and OmegaConf.is_interpolation(values, name):
            raw: Any = OmegaConf.to_container(values)
            OmegaConf.update(config, key, re.sub(r"\$\{(\w+)\}", as_variable, raw[name]))
        path = OmegaConf.select(config, key)
        if isinstance(path, str) and not in_identity(key):
            OmegaConf.update(config, key, str(read_path(key, path)))


def _refuse_two_budgets(config: Mapping[str, Any], typed: Collection[str]) -> None:
    """Refuses more than one of epochs, steps and samples: one would silently win."""
    given = []
    for key in BUDGETS:
        is_default = key == "epochs" and key not in typed
        if config[key] is not None and not is_default:
            given.append(key)
    if len(given) > 1:
        shown = " and ".join(f"{key}={as_typed(config[key])}" for key in given)
        # A training without epochs has another budget, so epochs alone cannot be null.
        others = sorted(set(given) - {"epochs"}, key=lambda key: (key in typed, key))
        raise UserError(f"{shown}: a training has one budget; keep one, or type {others[0]}=null")


def _choices_by_name(config: Mapping[str, Any], choices: Mapping[str, Any]) -> dict[str, str]:
    """The choice in each group; a class of the user's own goes by its name."""
    names = {}
    for group in GROUPS:
        if choices.get(group) is not None:
            names[group] = str(choices[group])
            if names[group] == "custom" and group != "logger":
                names[group] = _name_of(group, config[group])
    return names


def _name_of(group: str, values: Mapping[str, Any]) -> str:
    """The name of a user's own part; in full if a shipped choice has the same name."""
    target = str(values.get("_target_", MISSING)).replace(MISSING, "custom")
    name = short_name(target)
    return target if name in group_choices(group) else name


def short_name(target: str) -> str:
    """The name of a class or loader: `my_package.load_stripes` is stripes."""
    return target.rpartition(".")[2].removeprefix("load_")


def refuse_missing(config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Raises UserError for a missing value, a missing class of the user, or a missing logger."""
    refuse_missing_values(config)
    for group in CUSTOM_GROUPS:
        for part in parts_with_target(config.get(group)):
            target = part["_target_"]
            if not ships(group, choices.get(group), target) and (reason := why_missing(target)):
                raise UserError(f"{group}._target_={target}: {reason}")
    for name in ("wandb", "tensorboard", "mlflow"):
        if name in config["logger"] and find_spec(name) is None:
            raise UserError(f"logger={name} needs its package; pip install {name}")


def refuse_missing_values(tree: Mapping[str, Any], prefix: str = "") -> None:
    """Raises UserError for a `???` in a config, or in its part at the dotted key `prefix`."""
    for key in dotted_keys(tree):
        if value_at(tree, key) == MISSING:
            example = FORMER_DEFAULTS.get(f"{prefix}{key}", "...")
            raise UserError(f"{prefix}{key} is not set; give {prefix}{key}={example}")
