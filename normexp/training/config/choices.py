"""Parses the words of a command with Hydra, and composes the choices of the groups."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException, MissingConfigException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError
from yaml.reader import ReaderError

from normexp.errors import UserError
from normexp.training.config.groups import CUSTOM_GROUPS, GROUPS, conf_dir, group_choices
from normexp.training.config.keys import MISSING, dotted_keys
from normexp.training.config.validate import name_as_text, unknown_key
from normexp.words import as_typed, suggest

# Hydra 1.3 warns without a version_base, 1.4 warns about one.
VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# Keys of Hydra's own that may be typed: those of launchers and their jobs.
READ_OF_HYDRA = r"(/|\.)(launcher|searchpath|mode|job\.(name|env_))"
OTHERS_OF_HYDRA = {  # of keys that do nothing here: what to type instead
    "sweeper": "name several values as a,b with -m, or search with python -m normexp.tune",
    "dir": "changes nothing here; study=NAME and runs_dir=FOLDER say where results go",
    "verbose": "changes nothing here; messages go to stderr, and to run.log while a run trains",
    "logging": "changes nothing here; messages go to stderr, and to run.log while a run trains",
}
LAUNCHERS = {"ray": "ray", "submitit_slurm": "slurm", "submitit_local": "slurm"}  # and their extras
STATES = (ConfigStore, GlobalHydra, HydraConfig, JobRuntime, VersionBase)  # of a Hydra app
NEEDS_PACKAGE = "its YAML must begin with `# @package _global_`"
FEW = 12  # most choices that a message lists


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Parses each word with Hydra. Raises UserError for one that cannot be read.

    A dotted path is a choice of every group that takes the user's own classes:
    `norm=my_norm.LpNorm` is parsed as `norm=custom norm._target_=my_norm.LpNorm`.
    """
    return [override for word in words for override in _parse(word)]


@lru_cache(maxsize=1024)  # the points of a grid share most words
def _parse(word: str) -> list[Override]:
    key, equals, value = word.partition("=")
    if key.startswith("~"):
        raise UserError(f"{word}: no key can be removed; for the default leave it out, or try null")
    if not key or not equals:
        raise UserError(f"{word!r} is not key=value, as in norm=group or batch_size=8")
    name = key.lstrip("+")
    if name.startswith("hydra") and not re.match(READ_OF_HYDRA, name.removeprefix("hydra")):
        reasons = [reason for part, reason in OTHERS_OF_HYDRA.items() if part in name]
        raise UserError(f"{word}: {[*reasons, 'changes nothing here; --help lists the keys'][0]}")
    if name in GROUPS:  # every cell has one choice per group, so `+` means nothing
        key = name
    text = json.dumps(value) if value.startswith("~") else value
    parse = OverridesParser.create().parse_override
    try:
        if name in CUSTOM_GROUPS and re.fullmatch(r"[^\W\d]\w*(\.\w+)+", value):
            target = replace(parse(f"{key}._target_={value}"), input_line=word)
            return [parse(f"{key}=custom"), target]
        return [parse(name_as_text(f"{key}={text}"))]
    except HydraException:
        raise UserError(
            f"{word}: the value cannot be read; quote a text with special characters, as in "
            f"'{key}=\"...\"'"
        ) from None


def words_of(overrides: Sequence[Override]) -> dict[str, str]:
    """The words of parsed overrides as they were typed, by key."""
    words = [str(override.input_line) for override in overrides]
    return {word.lstrip("+").partition("=")[0]: word for word in words}


def is_choice(override: Override) -> bool:
    """True for a word that Hydra composes: a choice, or a key of Hydra's own."""
    return override.key_or_group in GROUPS or override.key_or_group.startswith("hydra")


@dataclass(frozen=True)
class Composed:
    """What Hydra composes of choices; shared, so do not write to it.

    Attributes:
        config: the values of all keys, with interpolations.
        keys: their dotted names.
        hydra: Hydra's own config.
    """

    config: DictConfig
    keys: Sequence[str]
    hydra: dict[str, Any]


def compose_choices(overrides: Sequence[Override]) -> Composed:
    """Composes the choices among overrides, none of them swept. Raises UserError."""
    chosen = [one for one in overrides if is_choice(one)]
    for one in chosen:
        if not one.key_or_group.startswith("hydra."):
            _check_names(one)
    return _compose_words(tuple(str(one.input_line) for one in chosen))


def _check_names(choice: Override) -> None:
    """Refuses a choice that is not one name. Loggers may be several; a mapping sets keys."""
    group, value = choice.key_or_group, choice.value()
    remedies = {
        NoneType: f"for the default, leave {group} out",
        list: "add -m and write a,b for several",
        dict: f"a class of yours is {group}=my_module.MyClass",
    }
    for name in value if group == "logger" and isinstance(value, list) else [value]:
        sets_keys = isinstance(name, dict) and "_target_" not in name
        if not isinstance(name, str) and not sets_keys:
            remedy = remedies.get(type(name), "--help lists the names")
            raise UserError(f"{choice.input_line}: takes one name; {remedy}")


_composing = threading.RLock()  # Hydra has one state for all threads


def forget_composed() -> None:
    """Reads the YAMLs anew from here on: those of the user's may have changed."""
    _compose_words.cache_clear()


@lru_cache(maxsize=64)
def _compose_words(words: tuple[str, ...]) -> Composed:
    try:
        with own_hydra(), hydra.initialize_config_dir(str(conf_dir()), **VERSION_BASE):
            config = hydra.compose("config", [*words], return_hydra_config=True)
            OmegaConf.set_struct(config, False)
            own: Any = OmegaConf.to_container(config.pop("hydra"))
    except MissingConfigException as error:
        raise _no_such_choice(error) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(error, words) from error
    except (HydraException, YAMLError, ValueError) as error:
        raise user_error_of(error) from error
    except RecursionError as error:
        typed = " ".join(word for word in words if not word.startswith("hydra."))
        raise UserError(f"{typed}: `defaults` of a YAML file lead back to that file") from error
    tree: Any = OmegaConf.to_container(config)
    for group in (*CUSTOM_GROUPS, "trainer", "logger"):
        values = tree.get(group, {})
        if not isinstance(values, Mapping) and (group, values) != ("callback", None):
            raise _not_a_mapping(group, values)
    return Composed(config, [*dotted_keys(tree)], own)


def user_error_of(error: Exception) -> UserError:
    """What an error of Hydra, OmegaConf or YAML means for who wrote the words or the file.

    Of any other error: its first line, with the next one where that ends in a colon.
    """
    if isinstance(error, ReaderError):
        code = f"{error.character:#04x}"
        return UserError(f"{error.name}: YAML forbids the character {code}; remove it")
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return UserError(f"{mark.name}, line {mark.line + 1}: not valid YAML")
    if named := re.search(r"Could not override '([^']+)'", str(error)):
        return _not_overridden(named[1], error.__cause__)
    if "DictConfig with ListConfig" in str(error) and (named := re.search("'(.+?)'", str(error))):
        where = "a list in place of a group, as `optim: [...]`; a recipe has keys below a group"
        return UserError(f"{named[1]}.yaml: {where}, as in `optim: {{KEY: VALUE}}`")
    text = f"{error}\n{error.__cause__ or ''}"
    first, second, *_ = [*map(str.strip, text.splitlines()), ""]
    return UserError(f"{first} {second}" if first.endswith(":") else first)


def _not_overridden(name: str, cause: BaseException | None) -> UserError:
    """A key that no YAML has, or a group at a package of its own, as norm@experiment.norm."""
    package = name.partition("@")[2].partition(".")[0]
    if package in GROUPS:
        return UserError(f"{package}: {NEEDS_PACKAGE}")
    return unknown_key(str(getattr(cause, "full_key", None) or name), ())


def _not_a_mapping(group: str, values: Any) -> UserError:
    name = values if isinstance(values, str) else "NAME"
    return UserError(
        f"{group}={as_typed(values)}: a recipe has keys below {group}, as in `{group}: "
        f"{{KEY: VALUE}}`; it chooses one in `defaults`, by `- override /{group}: {name}`"
    )


def _not_utf8(error: UnicodeDecodeError, words: Sequence[str]) -> UserError:
    """Names the file, which the error does not, among the YAMLs in the folders of the user's."""
    name = "a YAML of yours"
    for folder in re.findall(r"file://([^\"',\]]+)", " ".join(words)):
        for file in Path(folder).rglob("*.yaml"):
            if error.object in file.read_bytes():
                name = str(file)
    return UserError(f"{name} is not UTF-8; save it as UTF-8, without a byte order mark")


def _no_such_choice(error: MissingConfigException) -> UserError:
    group, _, name = str(error.missing_cfg_file).partition("/")
    if group not in GROUPS:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = f"it takes {', '.join(LAUNCHERS)}"
        needed = f"pip install -e '.[{LAUNCHERS[name]}]'" if name in LAUNCHERS else known
        return UserError(f"{group}={name}: no such choice; {needed}")
    choices = sorted({*group_choices(group), *(error.options or ())} - {"claims"})
    few = f"it takes {', '.join(choices)}" if len(choices) <= FEW else "--help lists all"
    hint = suggest(name, choices, most=3) or f"{few};"
    own = "YAMLs of yours need --config-dir FOLDER"
    if group in CUSTOM_GROUPS and re.search("[.:]", name):
        own = f"a class of yours is {group}=my_module.MyClass"
    return UserError(f"{group}={name}: no such {group}; {hint} {own}")


@contextmanager
def own_hydra() -> Iterator[None]:
    """Hydra as it is in a process of our own, with the choices `<group>=custom`.

    An app that calls normexp may be a Hydra app: its state and its configs are neither read nor
    changed. Those of plugins stay.
    """
    Plugins.instance()  # which adds their configs, once in a process
    with _composing:
        theirs = Singleton._instances
        Singleton._instances = {kind: one for kind, one in theirs.items() if kind not in STATES}
        try:
            store = ConfigStore.instance()
            store.repo["hydra"] = theirs[ConfigStore].repo["hydra"]  # type: ignore[attr-defined]
            for group, node in custom_choices().items():
                package = "logger.custom" if group == "logger" else None
                content = DictConfig(node, flags={"struct": False})
                store.store("custom", content, group, package, provider="normexp")
            yield
        finally:
            Singleton._instances = theirs


def custom_choices() -> dict[str, dict[str, Any]]:
    """What `<group>=custom` means: any knob, as in `norm=custom norm._target_=my.Norm`.

    A YAML file could not do this, since Hydra refuses unknown keys in configs from files.
    The guides in conf/ say what each target is called with.
    """
    own = {"_target_": MISSING}
    optim = {"default_lr": None, "weight_decay": 0.0, "decay_norm": False}
    nodes: dict[str, Any] = {group: own | {"_partial_": True} for group in CUSTOM_GROUPS}
    optim = nodes["optim"] | optim
    return nodes | {"data": own, "callback": {}, "optim": optim, "logger": own}
