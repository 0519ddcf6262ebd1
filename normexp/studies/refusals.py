"""Hydra's errors in the user's words: the key, the value, what would work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError
from yaml import MarkedYAMLError

from normexp.errors import UserError
from normexp.studies.folders import CUSTOM_GROUPS, GROUPS, group_choices
from normexp.studies.validate import RULES

_SAME_WORD = 0.8  # similarity at which a key elsewhere in the config is worth naming
_FEW = 12  # choices that a message has room for


def explain_syntax(text: str) -> UserError:
    """For an argument that Hydra's grammar cannot read."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        return UserError(f"{text!r} is not key=value, as in norm=group or batch_size=8")
    rule = RULES["study"]
    if key == "study" and not rule.holds(value):  # quoted it would be refused as well
        return UserError(f"{text}: must be {rule.wanted}")
    return UserError(f"{text}: the value cannot be read; quote it, as in '{key}=\"{value}\"'")


def refuse_lone_sweep(override: Override) -> None:
    """Several values without -m."""
    if not override.is_sweep_override():
        return
    remedy = "add -m to run each"
    key, _, value = str(override.input_line).partition("=")
    if "," in value and "(" not in value and (key not in GROUPS or key == "logger"):
        remedy += f", or write {key}=[{value}] for one list"
    raise UserError(f"{override.input_line} names several values: {remedy}")


def refuse_no_choice(override: Override, config_dirs: Sequence[str]) -> None:
    """A group that is given no name, or taken away, or added though it is there."""
    key, text = override.key_or_group, override.input_line
    if key == "hydra.searchpath":  # Hydra reads only one of these, and --config-dir is the other
        raise UserError(f"{text}: name the folders by --config-dir, once for each")
    if key not in GROUPS or override.is_sweep_override():
        return
    if override.is_add() or override.is_force_add():
        raise UserError(f"{text}: write it without the +, as {key} is always there")
    if override.is_delete():
        if key == "experiment":
            return
        raise UserError(f"{text}: no training goes without a {key}")
    value = override.value()
    names = value if key == "logger" and isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        choices = ", ".join(group_choices(key, config_dirs))
        raise UserError(f"{text}: {key} takes one name (choices: {choices})")


def refuse_known_addition(override: Override, known: DictConfig) -> None:
    """`+key=value` for a key that the config has."""
    if override.is_add() and override.key_or_group in _names(known):
        raise UserError(f"{override.input_line}: the key exists, write it without the +")


def refuse_other_target(key: str, default: Any, choices: Mapping[str, str]) -> None:
    """`norm=batch norm._target_=...`: records would call another norm by the name of batch."""
    group, _, leaf = key.partition(".")
    if leaf != "_target_" or group not in CUSTOM_GROUPS or choices.get(group) == "custom":
        return
    if default not in (None, "???"):
        raise UserError(
            f"{key} is set, but {group}={choices.get(group)} has one of its own; "
            f"try {group}=custom {key}=..."
        )


def explain_composition(
    error: Exception, known: DictConfig | None, config_dirs: Sequence[str]
) -> UserError:
    """For an error of Hydra's compose; `known` is the config before values are overridden."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error.missing_cfg_file, config_dirs)
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
        return unknown_key(cause.full_key, known)
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return UserError(f"{mark.name}, line {mark.line + 1}: not valid YAML ({error.problem})")
    lines = [*str(error).splitlines(), *str(cause or "").splitlines()]
    return UserError(next((line.strip() for line in lines if line.strip()), repr(error)))


def _unknown_choice(file: str, config_dirs: Sequence[str]) -> UserError:
    path = PurePosixPath(file)
    group, name = path.parent.as_posix(), path.name
    if group not in GROUPS:
        return UserError(f"{group}={name}: there is no such config")
    choices = group_choices(group, config_dirs)
    near = get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f"; did you mean {_either(near)}?" if near else ""
    own = f"; your own: {group}=custom {group}._target_=..." if group in CUSTOM_GROUPS else ""
    listed = f"choices: {', '.join(choices) or 'none'}"
    if len(choices) > _FEW:
        listed = f"normexp.train --help lists all {len(choices)}"
    return UserError(f"{group}={name}: no such {group}{hint} ({listed}{own})")


def unknown_key(key: str, known: DictConfig | None) -> UserError:
    """Names the nearest keys of the same level, then keys of nearly that name anywhere."""
    if known is None or key.startswith("hydra."):
        return UserError(f"{key}: unknown key")
    parent, _, leaf = key.rpartition(".")
    names = _names(known)
    siblings = [name for name in names if _parent(name) == parent]
    if parent and not siblings:
        return UserError(f"{key}: unknown key; {parent} has no keys below it")
    near = [
        f"{parent}.{name}".lstrip(".") for name in get_close_matches(leaf, map(_leaf, siblings))
    ]
    near = near or [name for name in names if _leaf(name) == leaf]
    near = near or [
        name for name in names if get_close_matches(leaf, [_leaf(name)], cutoff=_SAME_WORD)
    ]
    if near:
        return UserError(f"{key}: unknown key; did you mean {_either(near)}?")
    if not parent:
        return UserError(f"{key}: unknown key; --help lists those of a training")
    listed = ", ".join(_leaf(name) for name in siblings if not _leaf(name).startswith("_"))
    more = f"; +{key}=... adds one" if parent in CUSTOM_GROUPS else ""
    return UserError(f"{key}: unknown key ({parent} has {listed or 'none'}{more})")


def _names(config: DictConfig) -> list[str]:
    """Every dotted key of a config."""
    return list(_walk(OmegaConf.to_container(config), ""))


def _walk(tree: Any, prefix: str) -> Iterator[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            yield from _walk(value, f"{prefix}{name}.")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _either(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])
