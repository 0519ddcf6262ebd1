"""Composes configs from overrides with Hydra, and explains Hydra's errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from normexp.config.help import CUSTOM_GROUPS, GROUPS, check_config_dirs, conf_dir, group_choices
from normexp.config.rules import (
    ELSEWHERE,
    KEYS,
    OPEN_GROUPS,
    OPTIONAL_GROUPS,
    READ,
    check_value,
    either,
    refuse_type_change,
    suggest,
)
from normexp.errors import UserError

# Hydra 1.3 warns without a version_base, 1.4 warns about one.
VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
DEFAULT_SCHEDULE = {"schedule": "cosine", "warmup": 0.1}  # of an optimizer that has none
FEW = 12  # most choices that a message lists

# Launchers of Hydra that run a sweep's cells, and the extra of normexp that installs each.
LAUNCHERS = {"ray": "ray", "ray_aws": "ray", "submitit_local": "slurm", "submitit_slurm": "slurm"}


def compose_config(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """The config of one cell, without Hydra's own keys; see `compose_cell`."""
    return compose_cell(overrides, config_dirs)[0]


def compose_cell(
    overrides: Sequence[str], config_dirs: Sequence[str] = ()
) -> tuple[DictConfig, dict[str, str]]:
    """The config of one cell, and the name of what each group holds: {"norm": "batch", ...}.

    Args:
        overrides: `key=value` words of a command line, one value per key.
        config_dirs: folders with the user's own YAMLs, besides the shipped ones.

    Raises:
        UserError: an unknown choice or key, a word that cannot be read, a value of another type.
    """
    parsed = parse_overrides(overrides)
    for override in parsed:
        _refuse_lone_sweep(override)
    config = compose(overrides, config_dirs)
    choices = config.hydra.runtime.choices
    values = _plain(without_hydra(config))
    _refuse_unread(config, choices)
    defaults = _plain(_compose_choices(_choice_words(overrides), tuple(config_dirs)))
    for override in parsed:
        if not _is_choice(override) and not override.is_delete():
            key = override.key_or_group
            refuse_type_change(key, _select(defaults, key), _select(values, key))
            _refuse_other_target(key, _select(defaults, key), choices)
    if config.get("cells") is not None:
        raise UserError("cells=...: lists several cells; name one experiment, and drop hydra.mode")
    with open_dict(config):
        config.experiment = choices.get("experiment")  # for the loggers
    if isinstance(config.get("study"), int | float):  # study=2026 names a folder
        config.study = str(config.study)
    return config, names_of(config, choices)


def names_of(config: DictConfig, choices: Mapping[str, str | None]) -> dict[str, str]:
    """The name of what each group holds: its choice, or the user's own class if that is `custom`.

    `my_package.MyNorm` is MyNorm, `my_package.load_stripes` is stripes; a name that a shipped
    choice has already stays whole.
    """
    names = {group: str(name) for group in GROUPS if (name := choices.get(group)) is not None}
    for group, name in names.items():
        if name == "custom":
            target = str(config[group].get("_target_", "custom"))
            own = target.rpartition(".")[2].removeprefix("load_")
            names[group] = target if own in group_choices(group) else own
    return names


def compose(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """The config of `overrides`, with Hydra's own keys under `hydra`. Raises UserError."""
    parsed = parse_overrides(overrides)
    for override in parsed:
        _refuse_bad_choice(override, config_dirs)
    known = _compose_choices(_choice_words(overrides), tuple(config_dirs))
    for override in parsed:
        _refuse_bad_sign(override, known)
    config = _compose(overrides, config_dirs, known)
    if config.hydra.runtime.choices["hydra/launcher"] == "basic":
        _refuse_hydra_keys(parsed)
    return config


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parses each word with Hydra. Raises UserError for a word that cannot be read."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException:
            raise _explain_syntax(text) from None
        if not parsed[-1].key_or_group:
            raise _explain_syntax(text)
    return parsed


def without_hydra(config: DictConfig) -> DictConfig:
    with open_dict(config):
        del config["hydra"]
    return config


def quoted(text: str) -> str:
    """A text quoted for Hydra's grammar, which may then hold any characters."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@lru_cache(maxsize=1)
def register_custom() -> None:
    """Makes `<group>=custom` a choice that takes any knob: `norm=custom norm._target_=my.Norm`.

    A YAML file could not do this, since Hydra refuses unknown keys in configs from files. The
    target is called with its knobs by name, and also with:
    - norm: its number of features and eps, both found by name; a probe finds its layout. The key
      norm.view=sequence is not passed on: it shows the norm (B, T, C) as (B, C, T), not token by
      token.
    - model: `norm`, a NormFactory, and any of input_shape, num_outputs, vocab_size and block_size
      that its signature names. Without the argument `norm`, its norms are replaced (those of the
      classes in model.replace), and num_classes, in_channels and in_chans are known names too. The
      keys model.replace and model.weights are not passed on.
    - data: nothing else; it returns a `normexp.data.Data`.
    - optim: the parameters, lr and weight_decay.
    - schedule: step and total_steps; a scheduler class: the optimizer.
    - callback: nothing else.
    - logger (as logger.custom): save_dir, name, version, experiment_name and run_name, each if its
      signature names it; `per` is not passed on: run for an instance per run, cell for one that
      gets the mean over the seeds.
    """
    store = ConfigStore.instance()
    for group in CUSTOM_GROUPS:
        node: dict[str, Any] = {"_target_": "???"}
        if group != "data":
            node["_partial_"] = True
        if group == "callback":  # or several, each with a _target_ of its own
            node = {}
        if group == "optim":
            node |= {"default_lr": None, "weight_decay": 0.0, "decay_norm": False}
            node |= DEFAULT_SCHEDULE
        store.store("custom", DictConfig(node, flags={"struct": False}), group, provider="normexp")
    own = DictConfig({"_target_": "???", "per": "run"}, flags={"struct": False})
    store.store("custom", own, "logger", package="logger.custom", provider="normexp")


@lru_cache(maxsize=256)
def shipped_defaults(group: str, choice: str) -> dict[str, Any] | None:
    """The values in conf/<group>/<choice>.yaml; None for a choice that normexp does not ship."""
    if choice not in {*group_choices(group)} - {"custom"}:
        return None
    tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{choice}.yaml"))
    return tree["data"] if group == "data" else tree  # data files also set top-level keys


@lru_cache(maxsize=8)
def shipped_targets(group: str) -> dict[str, str]:
    """Maps each class in the shipped YAMLs of a group to its choice."""
    found: dict[str, str] = {}
    for choice in group_choices(group):
        values = shipped_defaults(group, choice)
        if values is not None:  # the first of several choices of one class
            found.setdefault(values["_target_"], f"{group}/{choice}")
    return found


@lru_cache(maxsize=1)
def shipped_config() -> dict[str, Any]:
    """The values in conf/config.yaml."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    return {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}


def _is_choice(override: Override) -> bool:
    """True if an override picks a file of a group rather than a value."""
    return override.key_or_group in GROUPS or override.key_or_group.startswith("hydra/")


def _choice_words(overrides: Sequence[str]) -> tuple[str, ...]:
    pairs = zip(overrides, parse_overrides(overrides), strict=True)
    return tuple(text for text, parsed in pairs if _is_choice(parsed))


@lru_cache(maxsize=64)
def _compose_choices(choices: tuple[str, ...], config_dirs: tuple[str, ...]) -> DictConfig:
    """The config before values are overridden; cached, since the cells of a sweep share it."""
    check_config_dirs(config_dirs)
    return without_hydra(_compose(choices, config_dirs, known=None))


def _compose(
    overrides: Sequence[str], config_dirs: Sequence[str], known: DictConfig | None
) -> DictConfig:
    register_custom()
    folders = ", ".join(quoted(f"file://{Path(folder).resolve()}") for folder in config_dirs)
    search = [f"hydra.searchpath=[{folders}]"] if config_dirs else []
    try:
        with hydra.initialize_config_dir(str(conf_dir()), **VERSION_BASE):
            return hydra.compose("config", [*search, *overrides], return_hydra_config=True)
    except (HydraException, YAMLError, ValueError) as error:
        raise _explain(error, known, overrides, config_dirs) from error


def _plain(config: DictConfig) -> Any:
    """All values, resolved. Raises UserError for an interpolation of a missing key."""
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from error


def parts_with_target(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a config, at any depth, that names something to build."""
    if isinstance(tree, dict):
        if isinstance(tree.get("_target_"), str):
            yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from parts_with_target(value)


def _select(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


# --- mistakes ---------------------------------------------------------------------------------


def _explain_syntax(text: str) -> UserError:
    """Returns the error for a word that Hydra's grammar cannot read."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        return UserError(f"{text!r} is not key=value, as in norm=group or batch_size=8")
    if key == "study":  # quoted it would be refused as well
        check_value(key, value, KEYS["study"].rule)
    return UserError(f"{text}: the value cannot be read; quote it, as in '{key}=\"{value}\"'")


def _refuse_lone_sweep(override: Override) -> None:
    """Refuses several values without -m."""
    if not override.is_sweep_override():
        return
    remedy = "add -m to run each"
    key, _, value = str(override.input_line).partition("=")
    if "," in value and "(" not in value and (key not in GROUPS or key == "logger"):
        remedy += f", or write {key}=[{value}] for one list"
    raise UserError(f"{override.input_line} names several values: {remedy}")


def _refuse_bad_choice(override: Override, config_dirs: Sequence[str]) -> None:
    """Refuses a group without a name, and a group added with +."""
    key, text = override.key_or_group, override.input_line
    if key == "hydra.searchpath":  # Hydra reads one of these, and --config-dir is it
        raise UserError(f"{text}: name each folder with --config-dir")
    if key not in GROUPS or override.is_sweep_override():
        return
    if override.is_add() or override.is_force_add():
        raise UserError(f"{text}: {key} is always there, write it without the +")
    if override.is_delete():
        return
    value = override.value()
    names = value if key == "logger" and isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{text}: {key} takes one name ({_listed(key, config_dirs)})")


def _refuse_bad_sign(override: Override, known: DictConfig) -> None:
    """Refuses to add a key that exists, and to remove one: a missing key has its default."""
    key, text = override.key_or_group, override.input_line
    if override.is_add() and key in _walk(known):
        raise UserError(f"{text}: the key exists, write it without the +")
    if override.is_delete() and key != "experiment":
        raise UserError(f"{text}: a key cannot be removed; give it a value, as {key}=...")


def _refuse_hydra_keys(parsed: Sequence[Override]) -> None:
    """Refuses Hydra's own keys that are not read, as no launcher runs the cells."""
    for key in [override.key_or_group for override in parsed]:
        if (
            key != "hydra/launcher"
            and re.match(r"hydra[./]", key)
            and not re.match(r"hydra\.(mode|sweeper\.params\b)", key)
        ):
            raise UserError(f"{key}: nothing reads this key of Hydra without hydra/launcher=...")


def _refuse_unread(config: DictConfig, choices: Mapping[str, str | None]) -> None:
    """Refuses a key that nothing reads, whether it was typed or stands in a YAML of the user's."""
    known = list(_walk(config))
    if not set(OPEN_GROUPS) <= set(known):  # a YAML put its keys at the top: `validate` says so
        return
    if "experiment" in known and (recipe := choices.get("experiment")):
        raise UserError(
            f"experiment={recipe}: nothing reads its keys; let its YAML begin with the line "
            "`# @package _global_`"
        )
    for key in known:
        is_open = key.partition(".")[0] in (*OPEN_GROUPS, *OPTIONAL_GROUPS)
        if not is_open and not key.startswith("logger.custom.") and key not in READ:
            raise _unknown_key(key, [name for name in known if name in READ])


def _refuse_other_target(key: str, default: Any, choices: Mapping[str, str]) -> None:
    """Refuses `norm=batch norm._target_=...`: records would name the other norm `batch`."""
    group, _, leaf = key.partition(".")
    if leaf != "_target_" or group not in CUSTOM_GROUPS or choices.get(group) == "custom":
        return
    if default not in (None, "???"):
        raise UserError(
            f"{key} is set, but {group}={choices.get(group)} has a target of its own; "
            f"try {group}=custom {key}=..."
        )


def _explain(
    error: Exception,
    known: DictConfig | None,
    overrides: Sequence[str],
    config_dirs: Sequence[str],
) -> UserError:
    """Returns the UserError for an error of Hydra; `known` is the config without overrides."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error.missing_cfg_file, config_dirs)
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
        if known is None:
            return _unknown_key(cause.full_key, [])
        chosen = _compose(_choice_words(overrides), config_dirs, known=None).hydra.runtime.choices
        return _unknown_key(cause.full_key, list(_walk(known)), chosen)
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return UserError(f"{mark.name}, line {mark.line + 1}: not valid YAML ({error.problem})")
    lines = [*str(error).splitlines(), *str(cause or "").splitlines()]
    said = [line.strip() for line in lines if line.strip()] or [repr(error)]
    return UserError(" ".join(said[:2]) if said[0].endswith(":") else said[0])


def _unknown_choice(file: str, config_dirs: Sequence[str]) -> UserError:
    group, _, name = PurePosixPath(file).as_posix().partition("/")
    if group not in GROUPS:
        group, _, name = file.rpartition("/")
        if group == "hydra/launcher":
            return unknown_launcher(name)
        return UserError(f"{group}={name}: no such config")
    choices = group_choices(group, config_dirs)
    hint = suggest(name, choices, most=3, cutoff=0.5)
    listed = _listed(group, config_dirs)
    own = f"; your own: {group}=custom {group}._target_=..." if group in CUSTOM_GROUPS else ""
    if group == "schedule":
        own = f"; a shape by name: optim.schedule=...{own}"
    return UserError(f"{group}={name}: no such {group}{hint and f'; {hint}'} ({listed}{own})")


def unknown_launcher(name: str) -> UserError:
    """The error for a launcher that is not installed, or not known."""
    if name in LAUNCHERS:
        remedy = f"pip install 'normexp[{LAUNCHERS[name]}]'"
        return UserError(f"hydra/launcher={name} is not installed; {remedy}")
    known = ", ".join(["basic", *LAUNCHERS])
    return UserError(f"hydra/launcher={name}: no such launcher (choices: {known})")


def _listed(group: str, config_dirs: Sequence[str]) -> str:
    """The choices of a group, or where to find them if they are many."""
    choices = group_choices(group, config_dirs)
    if len(choices) > FEW:
        return f"normexp.train --help lists all {len(choices)}"
    return f"choices: {', '.join(choices) or 'none'}"


def _unknown_key(
    key: str, names: Sequence[str], choices: Mapping[str, str] | None = None
) -> UserError:
    """Names the nearest keys on the same level, otherwise similar keys on other levels."""
    if key.startswith("hydra."):
        return UserError(f"{key}: unknown key")
    parent, _, leaf = key.rpartition(".")
    if key in OPTIONAL_GROUPS:  # `key` itself or a key below it was set
        others = " or ".join(name for name in names if _leaf(name) == key)
        rest = f", or did you mean {others}?" if others else ""
        return UserError(f"{key}: this training has none; choose one, as {key}=custom{rest}")
    if leaf in ELSEWHERE:
        return UserError(f"{key}: unknown key; {ELSEWHERE[leaf]}")
    siblings = [name for name in names if name.rpartition(".")[0] == parent]
    if parent and not siblings:
        return UserError(f"{key}: unknown key; {parent} has no keys below it")
    elsewhere = [name for name in names if _leaf(name) == leaf]
    alike = [name for name in names if suggest(leaf, [_leaf(name)], cutoff=0.8)]
    prefix = f"{parent}." if parent else ""
    hint = "" if elsewhere else suggest(leaf, map(_leaf, siblings), prefix=prefix)
    if not hint and (elsewhere or alike):
        hint = f"did you mean {either(elsewhere or alike)}?"
    if hint:
        return UserError(f"{key}: unknown key; {hint}")
    if not parent:
        return UserError(f"{key}: unknown key; --help lists the keys of a training")
    listed = ", ".join(_leaf(name) for name in siblings if not _leaf(name).startswith("_"))
    own = parent in CUSTOM_GROUPS  # its keys depend on the choice, which the line may not name
    more = f"; +{key}=... passes it on" if own else ""
    group = f"{parent}={choices[parent]}" if own and choices else parent
    return UserError(f"{key}: unknown key ({group} has {listed or 'none'}{more})")


def _walk(config: DictConfig) -> Iterator[str]:
    """Every dotted key of a config."""

    def below(tree: Any, prefix: str) -> Iterator[str]:
        if isinstance(tree, dict):
            for name, value in tree.items():
                yield f"{prefix}{name}"
                yield from below(value, f"{prefix}{name}.")

    return below(OmegaConf.to_container(config), "")


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
