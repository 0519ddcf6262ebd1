"""The one place that talks to Hydra's compose API, so that its errors surface in one place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from normexp.config.help import CUSTOM_GROUPS, GROUPS, check_config_dirs, conf_dir
from normexp.config.rules import (
    explain_composition,
    explain_syntax,
    refuse_known_addition,
    refuse_lone_sweep,
    refuse_no_choice,
    refuse_other_target,
    refuse_type_change,
)
from normexp.errors import UserError

# Hydra 1.3 warns without a version_base, 1.4 warns about one.
VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Hydra's reading of each text. Raises UserError for one that cannot be read."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException:
            raise explain_syntax(text) from None
        if not parsed[-1].key_or_group:
            raise explain_syntax(text)
    return parsed


def is_choice(override: Override) -> bool:
    """Whether an override picks a file of a group instead of a value."""
    return override.key_or_group in GROUPS or override.key_or_group.startswith("hydra/")


def compose(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """The config of `overrides` with Hydra's own part under `hydra`. Raises UserError."""
    parsed = parse_overrides(overrides)
    for override in parsed:
        refuse_no_choice(override, config_dirs)
    known = compose_choices(choice_texts(overrides), tuple(config_dirs))
    for override in parsed:
        refuse_known_addition(override, known)
    return _compose(overrides, config_dirs, known)


def without_hydra(config: DictConfig) -> DictConfig:
    with open_dict(config):
        del config["hydra"]
    return config


def choice_texts(overrides: Sequence[str]) -> tuple[str, ...]:
    """Those of `overrides` that pick a file of a group."""
    pairs = zip(overrides, parse_overrides(overrides), strict=True)
    return tuple(text for text, parsed in pairs if is_choice(parsed))


@lru_cache(maxsize=64)
def compose_choices(choices: tuple[str, ...], config_dirs: tuple[str, ...]) -> DictConfig:
    """The config before any single value is overridden; cached, as cells of a sweep share it."""
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
        raise explain_composition(error, known, config_dirs) from error


def quoted(text: str) -> str:
    """A text as Hydra's grammar takes it whatever is in it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@lru_cache(maxsize=1)
def register_custom() -> None:
    """Makes `<group>=custom` a choice that takes any knob: `norm=custom norm._target_=my.Norm`.

    A file could not do this, as Hydra closes what it reads from files to unknown keys. What is
    called, with the knobs by name:
    - norm: with its number of features and eps, found by name, its layout by a probe; the key
      norm.view=sequence is not the norm's: it shows (B, T, C) as (B, C, T) instead of by token.
    - model: with `norm`, a NormFactory, and those of input_shape, num_outputs, vocab_size and
      block_size that its signature names.
    - data: returns a `normexp.data.Data`.
    """
    store = ConfigStore.instance()
    for group in CUSTOM_GROUPS:
        node = {"_target_": "???"} if group == "data" else {"_target_": "???", "_partial_": True}
        store.store("custom", DictConfig(node, flags={"struct": False}), group, provider="normexp")


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
