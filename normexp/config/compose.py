"""Composes the config of a cell: Hydra composes its choices, then each value is set and checked.

The composed choices are cached, since the cells of a sweep share them. A mistake is a UserError
with a remedy.
"""

from __future__ import annotations

import copy
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from normexp.config.help import (
    CUSTOM_GROUPS,
    GROUPS,
    check_config_dirs,
    choice_files,
    conf_dir,
    group_choices,
)
from normexp.config.rules import (
    MISSING,
    OPTIONAL_GROUPS,
    as_typed,
    name_as_text,
    refuse_type_change,
    suggest,
    unknown_key,
)
from normexp.errors import UserError
from normexp.records.sources import why_missing

# Hydra 1.3 warns without a version_base, 1.4 warns about one.
VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
DEFAULT_SCHEDULE = {"schedule": "cosine", "warmup": 0.1}  # of an optimizer that has none
# The key of a data set that names the user's own files, and what these must be.
PATHS = {
    "normexp.data.image_folder.load_image_folder": (
        "data.root",
        "name a folder with images in {0}/<class>/, or {0}/train/<class>/ and {0}/test/<class>/",
    ),
    "normexp.data.text.load_text_file": ("data.path", "name a text file"),
}
FEW = 12  # most choices that a message lists

AS_BUILT = "normexp.norms.as_built.AsBuilt"  # of norm=as_built, which has no YAML


def compose_config(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> dict[str, Any]:
    """The config of one cell; see `compose_cell`."""
    return compose_cell(overrides, config_dirs)[0]


def compose_cell(
    overrides: Sequence[str], config_dirs: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of one cell, and its choice in each config group: {"norm": "batch", ...}.

    No DictConfig goes further: interpolations are resolved, and `???` stands for a missing value.

    Args:
        overrides: `key=value` words of a command line, one value per key.
        config_dirs: folders with the user's own YAMLs, besides the shipped ones.

    Raises:
        UserError: an unknown choice or key, a word that cannot be read, a value of another type.
    """
    parsed = parse_overrides(overrides)
    for override in parsed:
        if override.is_sweep_override():
            raise _missing_multirun(override)
    base = compose_choices(parsed, config_dirs)
    tree = copy.deepcopy(base.config)
    typed = [override for override in parsed if not _is_choice(override)]
    for override in typed:
        _set_value(tree, override, base)
    config = _plain(tree)
    _refuse_unread(config, base)
    _refuse_second_budget(config, [override.key_or_group for override in typed])
    for override in typed:
        key = override.key_or_group
        refuse_type_change(key, _select(base.defaults, key), _select(config, key))
    config["experiment"] = base.choices.get("experiment")  # for the loggers
    if isinstance(config.get("study"), int | float):  # study: 2026 in a YAML names a folder
        config["study"] = as_typed(config["study"])
    return config, _names_of(config, base.choices)


def refuse_missing_files(config: Mapping[str, Any]) -> None:
    """Refuses what the building of a cell would refuse, without torch and in no time.

    Raises:
        UserError: a required key without a value, or a module, folder or file that is not there.
    """
    refuse_missing_values(config)
    refuse_missing_targets(config)
    for target, (key, needs) in PATHS.items():
        path = Path(str(_select(config, key)))
        if _select(config, "data._target_") == target and not path.exists():
            raise UserError(f"{key}={path} does not exist; {needs.format(path)}")


def refuse_missing_targets(config: Mapping[str, Any]) -> None:
    """Raises UnknownChoice for a class or function of the user that is not there."""
    for group in CUSTOM_GROUPS:
        for part in parts_with_target(config.get(group)):
            if reason := why_missing(part["_target_"]):
                raise UnknownChoice(f"{group}._target_={part['_target_']}: {reason}")
    for name in ("wandb", "tensorboard"):
        if name in config["logger"] and find_spec(name) is None:
            raise UnknownChoice(
                f"logger={name} needs the package {name}; pip install 'normexp[{name}]'"
            )


def refuse_missing_values(tree: Mapping[str, Any], prefix: str = "") -> None:
    """Raises UserError for a `???` in a config, or in its part at the dotted key `prefix`."""
    for key in dotted_keys(tree):
        if _select(tree, key) == MISSING:
            raise UserError(f"{prefix}{key} is not set; give {prefix}{key}=...")


def _names_of(config: Mapping[str, Any], choices: Mapping[str, str | None]) -> dict[str, str]:
    """The choice in each config group, with the user's own class in place of `custom`.

    `my_package.MyNorm` is MyNorm, `my_package.load_stripes` is stripes. A name that a shipped
    choice has too is kept in full.
    """
    names = {group: str(name) for group in GROUPS if (name := choices.get(group)) is not None}
    for group, name in names.items():
        if name == "custom":
            target = config[group].get("_target_", MISSING)
            target = "custom" if target == MISSING else str(target)
            name_of_target = target.rpartition(".")[2].removeprefix("load_")
            names[group] = target if name_of_target in group_choices(group) else name_of_target
    return names


# --- words ---------------------------------------------------------------------------------------


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parses each word with Hydra; `norm=my_norm.LpNorm` becomes two overrides.

    Raises UserError for a word that cannot be read.
    """
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not key or not equals or key.startswith("~"):
            raise UserError(f"{text!r} is not key=value, as in norm=group or batch_size=8")
        try:
            parsed += parser.parse_overrides([name_as_text(text)])
        except HydraException:
            raise _unreadable(key, value) from None
        swept = parsed[-1].value()
        if key in CUSTOM_GROUPS and isinstance(swept, str) and names_target(swept):
            parsed[-1:] = parser.parse_overrides([f"{key}=custom", f"{key}._target_={swept}"])
    return parsed


def names_target(choice: str) -> bool:
    """True for a dotted path, as `my_norm.LpNorm`, which stands for `custom` with this target."""
    is_path = re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", choice) is not None
    return is_path and not choice.endswith((".yaml", ".yml"))


def _unreadable(key: str, value: str) -> UserError:
    """The error for a value that Hydra's grammar does not allow."""
    text = quoted(value) if {'"', "\\"} & set(value) else f'"{value}"'
    typed = shlex.quote(f"{key}={text}")
    return UserError(f"{key}={value}: the value cannot be read; quote it, as in {typed}")


def quoted(text: str) -> str:
    """A text quoted for Hydra's grammar, which may then hold any characters."""
    doubled = re.sub(
        r"(\\+)(?='|$)", r"\1\1", text
    )  # the grammar reads other backslashes as they are
    return "'" + doubled.replace("'", "\\'") + "'"


def _is_choice(override: Override) -> bool:
    """True for a word that Hydra composes: it picks a file of a group, or sets a key of Hydra."""
    key = override.key_or_group
    return key in GROUPS or key.startswith(("hydra.", "hydra/")) or override.package is not None


def _missing_multirun(override: Override) -> UserError:
    """The error for several values without -m."""
    key, _, value = str(override.input_line).partition("=")
    return UserError(
        f"{override.input_line} names several values: add -m to run each, or write "
        f"{key}=[{value}] for one list"
    )


# --- choices -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComposedChoices:
    """The config that the choices of a command line compose to, before values are set.

    Attributes:
        config: every key, at its default.
        hydra: Hydra's own keys.
        choices: the choice of each group, those of Hydra included.
    """

    config: DictConfig
    hydra: DictConfig
    choices: Mapping[str, str | None]

    @cached_property
    def launcher(self) -> str | None:
        """The Hydra launcher that runs the cells; None for normexp's own workers."""
        name = self.choices["hydra/launcher"]
        return None if name == "basic" else name

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The values of `config`, resolved."""
        return _plain(self.config)

    @cached_property
    def keys(self) -> list[str]:
        """Every dotted key of `config`."""
        return list(dotted_keys(OmegaConf.to_container(self.config)))


def compose_choices(parsed: Sequence[Override], config_dirs: Sequence[str] = ()) -> ComposedChoices:
    """Composes the choices among the words, without those that are swept. Raises UserError."""
    chosen = [
        override for override in parsed if _is_choice(override) and not override.is_sweep_override()
    ]
    for override in chosen:
        _check_choice(override, config_dirs)
    words = tuple(str(override.input_line) for override in chosen)
    return _compose(words, tuple(config_dirs), _modified_at(config_dirs))


def _modified_at(config_dirs: Sequence[str]) -> tuple[tuple[Path, int], ...]:
    """When the user's YAMLs were modified, for the cache: a notebook may edit them in between."""
    folders = [Path(config_dir, group) for config_dir in config_dirs for group in GROUPS]
    files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    return tuple((file, file.stat().st_mtime_ns) for file in files)


_composing = threading.Lock()  # Hydra has one state for all threads


@lru_cache(maxsize=64)
def _compose(
    choices: tuple[str, ...], config_dirs: tuple[str, ...], _: tuple[tuple[Path, int], ...]
) -> ComposedChoices:
    check_config_dirs(config_dirs)
    register_custom()
    folders = ", ".join(quoted(f"file://{Path(folder).resolve()}") for folder in config_dirs)
    search = [f"hydra.searchpath=[{folders}]"] if config_dirs else []
    try:
        with _composing, hydra.initialize_config_dir(str(conf_dir()), **VERSION_BASE):
            config = hydra.compose("config", [*search, *choices], return_hydra_config=True)
    except (HydraException, YAMLError, ValueError) as error:
        raise _explain(error, config_dirs) from error
    hydra_config = config.hydra
    chosen = dict(hydra_config.runtime.choices)
    for group in GROUPS:  # Hydra reads norm=group.yaml and norm=../norm/group as well
        name = chosen.get(group)
        if isinstance(name, str) and name not in group_choices(group, config_dirs):
            raise _unknown_choice(f"{group}/{name}", config_dirs)
    with open_dict(config):
        del config["hydra"]
    return ComposedChoices(config, hydra_config, chosen)


@lru_cache(maxsize=1)
def register_custom() -> None:
    """Makes `<group>=custom` a choice that takes any knob: `norm=custom norm._target_=my.Norm`.

    A YAML file could not do this, since Hydra refuses unknown keys in configs from files.
    The guides in conf/ say what each target is called with.
    """
    nodes: dict[str, dict[str, Any]] = {
        group: {"_target_": "???", "_partial_": True} for group in CUSTOM_GROUPS
    }
    nodes["data"] = {"_target_": "???"}
    nodes["callback"] = {}  # or several, each with a _target_ of its own
    nodes["optim"] |= {"default_lr": None, "weight_decay": 0.0, "decay_norm": False}
    nodes["optim"] |= DEFAULT_SCHEDULE
    nodes["logger"] = {"_target_": "???"}
    as_built = shipped_defaults("norm", "as_built")
    ConfigStore.instance().store("as_built", as_built, "norm", provider="normexp")
    for group, node in nodes.items():
        package = "logger.custom" if group == "logger" else None
        content = DictConfig(node, flags={"struct": False})
        ConfigStore.instance().store("custom", content, group, package, provider="normexp")


@lru_cache(maxsize=256)
def shipped_defaults(group: str, choice: str) -> dict[str, Any] | None:
    """The values in conf/<group>/<choice>.yaml; None for a choice that normexp does not ship."""
    if (group, choice) == ("norm", "as_built"):
        return {"_target_": AS_BUILT, "_partial_": True}
    if choice not in choice_files(group, ()):
        return None
    tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{choice}.yaml"))
    return tree["data"] if group == "data" else tree  # data files also set top-level keys


@lru_cache(maxsize=8)
def shipped_targets(group: str) -> dict[str, str]:
    """Maps each class in the shipped YAMLs of a group to its choice."""
    choices: dict[str, str] = {}
    for choice in group_choices(group):
        values = shipped_defaults(group, choice)
        if values is not None:  # the first of several choices of one class
            choices.setdefault(values["_target_"], f"{group}/{choice}")
    return choices


@lru_cache(maxsize=1)
def shipped_config() -> dict[str, Any]:
    """The values in conf/config.yaml."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    return {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}


def _check_choice(override: Override, config_dirs: Sequence[str]) -> None:
    """Refuses a group without a name, or added with +."""
    key, text = override.key_or_group, override.input_line
    if key.startswith("hydra.sweeper.params.") or key == "hydra.searchpath":
        raise UserError(f"{text}: type the keys themselves, as -m lr=0.1,1, and --config-dir")
    if key not in GROUPS:
        return
    if override.is_add() or override.is_force_add():
        raise UserError(f"{text}: {key} already exists; drop the +")
    value = override.value()
    names = value if key == "logger" and isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{text}: {key} takes one name ({_describe_choices(key, config_dirs)})")


def _explain(error: Exception, config_dirs: Sequence[str]) -> UserError:
    """The UserError for an error of Hydra while it composes choices."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error.missing_cfg_file, config_dirs)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
        return UserError(f"{cause.full_key}: unknown key")
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return UserError(f"{mark.name}, line {mark.line + 1}: not valid YAML ({error.problem})")
    lines = [*str(error).splitlines(), *str(cause or "").splitlines()]
    shown = [line.strip() for line in lines if line.strip()] or [repr(error)]
    return UserError(" ".join(shown[:2]) if shown[0].endswith(":") else shown[0])


class UnknownChoice(UserError):
    """A group has no such choice, as in `norm=gruop` or `norm=my_norm.LpNrom`."""


def _unknown_choice(file: str, config_dirs: Sequence[str]) -> UserError:
    group, _, name = file.partition("/")
    if group not in GROUPS:
        group, _, name = file.rpartition("/")
        extras = "; pip install 'normexp[ray]' or 'normexp[slurm]'" * (group == "hydra/launcher")
        return UserError(f"{group}={name}: no such config{extras}")
    hint = suggest(name, group_choices(group, config_dirs), most=3, cutoff=0.5)
    remedies = [_describe_choices(group, config_dirs)]
    if group in CUSTOM_GROUPS:
        remedies.append(f"your own: {group}=custom {group}._target_=...")
    return UnknownChoice(
        f"{group}={name}: no such {group}{hint and f'; {hint}'} ({'; '.join(remedies)})"
    )


def _describe_choices(group: str, config_dirs: Sequence[str]) -> str:
    """The choices of a group, or where to find them if they are many."""
    choices = group_choices(group, config_dirs)
    if len(choices) > FEW:
        return f"normexp.train --help lists all {len(choices)}"
    return f"choices: {', '.join(choices) or 'none'}"


# --- values --------------------------------------------------------------------------------------


def _set_value(config: DictConfig, override: Override, base: ComposedChoices) -> None:
    """Sets the value of one word. Raises UserError for a key that cannot be set."""
    key, text = override.key_or_group, override.input_line
    if override.is_add() and key in base.keys:
        raise UserError(f"{text}: the key already exists; drop the +")
    group, _, leaf = key.partition(".")
    is_shipped = group in CUSTOM_GROUPS and base.choices.get(group) != "custom"
    has_target = _select(base.defaults, key) not in (None, MISSING)
    if leaf == "_target_" and is_shipped and has_target:
        raise UserError(  # else records would name the choice for another class
            f"{key} is set, but {group}={base.choices.get(group)} has a target of its own; "
            f"try {group}=custom {key}=... in a command of its own"
        )
    is_new = override.is_add() or override.is_force_add()
    try:
        OmegaConf.update(config, key, override.value(), force_add=is_new)
    except (ConfigAttributeError, ConfigKeyError) as error:
        raise _unknown_key(error.full_key or key, base) from None
    except (OmegaConfBaseException, ValueError) as error:  # ValueError: a name below a list
        raise UserError(f"{text}: {str(error).splitlines()[0]}") from error


def _refuse_unread(plain: dict[str, Any], base: ComposedChoices) -> None:
    """Refuses a recipe whose keys stand below `experiment`, where nothing reads them."""
    if "experiment" in plain and (recipe := base.choices.get("experiment")):
        raise UserError(
            f"experiment={recipe}: nothing reads its keys; let its YAML begin with the line "
            "`# @package _global_`"
        )


def _refuse_second_budget(plain: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Refuses a typed budget beside another one, which would win unseen."""
    budgets = [key for key in ("steps", "samples") if plain.get(key) is not None]
    budgets += ["epochs"] * ("epochs" in typed)
    if len(budgets) > 1 and set(budgets).intersection(typed):
        words = " and ".join(f"{key}={as_typed(plain[key])}" for key in sorted(budgets))
        raise UserError(f"{words}: a training has one budget; keep one, and set the other to null")


def _unknown_key(key: str, base: ComposedChoices) -> UserError:
    """The error for a key that does not exist; a knob of a part may be new to its YAML."""
    group = key.partition(".")[0]
    if key in OPTIONAL_GROUPS:
        return UserError(f"{key}: this training has no {key}; choose one, as {key}=custom")
    error = unknown_key(key, [name for name in base.keys if name.rpartition(".")[2][0] != "_"])
    if group in CUSTOM_GROUPS and group != key:
        return UserError(f"{error}; +{key}=... passes a new one on to the {group}")
    return error


# --- trees ---------------------------------------------------------------------------------------


def _plain(config: DictConfig) -> Any:
    """All values, resolved. Raises UserError for an interpolation of a missing key."""
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from error


def parts_with_target(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a config, at any depth, that has a `_target_`."""
    if isinstance(tree, dict):
        if isinstance(tree.get("_target_"), str):
            yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from parts_with_target(value)


def dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Every key of nested dicts, as `optim` and `optim.momentum`."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            yield from dotted_keys(value, f"{prefix}{name}.")


def _select(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
