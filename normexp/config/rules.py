"""Values that no training could use, refused before any work with the key and a remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any, NamedTuple, get_args

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError
from yaml import MarkedYAMLError

from normexp.batching.sizes import Sizes
from normexp.config.help import CUSTOM_GROUPS, GROUPS, group_choices
from normexp.config.place import place_among
from normexp.errors import UserError
from normexp.norms.slots import Act, Conv, Placement


def refuse_type_change(key: str, default: Any, value: Any) -> None:
    """A value of another type than its default: true or false, numbers and lists are kept apart.

    A null or text default says nothing of a type, and Lightning checks the trainer's values itself.
    """
    if default is None or value is None or key.startswith("trainer."):
        return
    kind = next((kind for kind in _KINDS if isinstance(default, kind)), None)
    if kind is None or _fits(value, kind):
        return
    raise UserError(
        f"{key}={as_typed(value)}: not {_KINDS[kind]}, as its default {as_typed(default)} is"
    )


# In this order, as a bool is an int to Python.
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a group of keys",
}


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def as_typed(value: Any) -> str:
    """A value as the command line takes it: null, true, false, 3."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


LONGEST_NAME = 200  # bytes; file systems take 255, and names are made of this one


class Rule(NamedTuple):
    """What a value must be: a test and its name in a message."""

    holds: Callable[[Any], bool]
    wanted: str
    nullable: bool = False


def validate(config: DictConfig) -> None:
    """Checks the values of one cell that need neither data nor model. Raises UserError."""
    for group in CUSTOM_GROUPS:
        if not config[group].get("_target_"):
            raise UserError(
                f"{group}._target_ is missing: name a class or function, as in "
                f"{group}._target_=my_package.MyClass, and its knobs as {group}.<knob>=..."
            )
    for key in OPTIM_KEYS:
        if key not in config.optim:
            raise UserError(f"optim.{key} is missing: an optimizer's YAML says it, see conf/optim")
    validate_keys(config, RULES)
    sizes = Sizes(config.batch_size, config.micro_batch_size, config.norm_batch_size)
    sizes.shared_by(_num_devices(config))


def _num_devices(config: DictConfig) -> int:
    """Devices of all nodes. Refuses several that nothing brings together."""
    devices, num_nodes = config.trainer.devices, config.trainer.num_nodes
    if devices * num_nodes > 1 and config.trainer.strategy != "ddp":
        key = "devices" if devices > 1 else "num_nodes"
        raise UserError(
            f"trainer.{key}={config.trainer[key]}: for several devices take trainer=ddp"
        )
    if num_nodes > 1 and place_among(devices * num_nodes) is None:
        raise UserError(
            f"trainer.num_nodes={num_nodes}: start this line on every node, by srun or torchrun, "
            f"as {devices * num_nodes} processes in all"
        )
    return devices * num_nodes


def validate_keys(config: DictConfig, keys: Iterable[str]) -> None:
    """Checks the values of some keys by themselves. Raises UserError."""
    for key in keys:
        _check(config, key, RULES[key])


def _check(config: DictConfig, key: str, rule: Rule) -> None:
    group, _, leaf = key.rpartition(".")
    level = OmegaConf.select(config, group) if group else config
    if level is None:  # a logger that was not chosen
        return
    if leaf not in level:
        if group:  # a knob of another optimizer
            return
        raise UserError(f"{key} is missing: it must be {rule.wanted}")
    value = level[leaf]
    if value is None and rule.nullable or value is not None and rule.holds(value):
        return
    null = " or null" if rule.nullable else ""
    raise UserError(f"{key}={as_typed(value)}: must be {rule.wanted}{null}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_real = _is_whole(value) or isinstance(value, float)
    return is_real and math.isfinite(value)


def _is_name(value: Any) -> bool:
    is_text = isinstance(value, str) and re.fullmatch(r"\w[\w.+-]*", value) is not None
    return is_text and len(value.encode()) <= LONGEST_NAME


def _one_of(*choices: str | bool) -> Rule:
    words = [as_typed(choice) for choice in choices]
    kinds = tuple({type(choice) for choice in choices})
    return Rule(lambda v: isinstance(v, kinds) and v in choices, f"one of {', '.join(words)}")


def _list_of(rule: Rule) -> Rule:
    def holds(value: Any) -> bool:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and len(value) > 0 and all(map(rule.holds, value))

    return Rule(holds, f"a list, each {rule.wanted}")


COUNT = Rule(lambda v: _is_whole(v) and v > 0, "a whole number above 0")
SIZE = COUNT._replace(nullable=True)
POSITIVE = Rule(lambda v: _is_number(v) and v > 0, "a number above 0")
NOT_NEGATIVE = Rule(lambda v: _is_number(v) and v >= 0, "a number, 0 or more")
FRACTION = Rule(lambda v: _is_number(v) and 0 <= v < 1, "a number from 0 to below 1")
FLAG = Rule(lambda v: isinstance(v, bool), "true or false")
FOLDER = Rule(lambda v: isinstance(v, str) and v != "", "a folder")

OPTIM_KEYS = ("_target_", "weight_decay", "decay_norm", "schedule", "warmup")

SLOT_RULES = {
    "act": _one_of(*get_args(Act))._replace(nullable=True),
    "conv": _one_of(*get_args(Conv))._replace(nullable=True),
    "residual_scale": Rule(_is_number, "a number", nullable=True),
    "placement": _one_of(*get_args(Placement))._replace(nullable=True),
    "qk_norm": FLAG._replace(nullable=True),
}

RULES = {
    **SLOT_RULES,
    **{f"norm.{key}": rule for key, rule in SLOT_RULES.items()},
    "logger.wandb.mode": _one_of("auto", "online", "offline", "disabled"),
    "batch_size": COUNT,
    "micro_batch_size": SIZE,
    "norm_batch_size": SIZE,
    "epochs": COUNT,
    "lr": POSITIVE,
    "steps": SIZE,
    "samples": SIZE,
    "lr_rule": _one_of("none", "linear", "sqrt", "momentum_aware"),
    "base_batch_size": COUNT,
    "max_grad_norm": POSITIVE._replace(nullable=True),
    "seed": Rule(lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more"),
    "replicas": COUNT,
    "study": Rule(
        _is_name,
        "a folder name of letters, digits, dot, plus, dash and underscore, "
        f"of at most {LONGEST_NAME} bytes",
    ),
    "dry_run": FLAG,
    "workers": Rule(lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more", True),
    "fail_fast": FLAG,
    "retry_failed": FLAG,
    "max_attempts": COUNT,
    "runs_dir": FOLDER,
    "data_dir": FOLDER,
    "eps": NOT_NEGATIVE,
    "drop_last": FLAG,
    "val_every_epochs": COUNT,
    "chunk": COUNT,
    "log_every": COUNT,
    "stack": _one_of("auto", True, False),
    "compile": FLAG,
    "matmul_precision": _one_of("highest", "high", "medium"),
    "save_weights": FLAG,
    "allow_leak": FLAG,
    "diagnostics": Rule(lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more", True),
    "evaluate_with": _list_of(_one_of("running", "precise", "batch")),
    "precise_samples": Rule(lambda v: _is_whole(v) and v > 1, "a whole number above 1"),
    "evaluate_batch_sizes": _list_of(COUNT)._replace(nullable=True),
    "evaluate_every_epoch": FLAG,
    "norm.half_life": POSITIVE._replace(nullable=True),
    "optim.momentum": FRACTION,
    "optim.nesterov": FLAG,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.decay_norm": FLAG,
    "optim.fused": FLAG,
    "optim.schedule": _one_of("constant", "cosine", "one_cycle"),
    "optim.warmup": FRACTION,
    "trainer.devices": COUNT,
    "trainer.num_nodes": COUNT,
    "trainer.strategy": _one_of("auto", "ddp"),
    "trainer.precision": _one_of("32-true", "bf16-mixed", "64-true"),
    "tune.trials": COUNT,
    "tune.seeds": Rule(lambda v: _is_whole(v) and v > 1, "a whole number above 1: one run is luck"),
    "tune.first_seed": Rule(lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more"),
    "tune.metric": Rule(lambda v: isinstance(v, str) and v != "", "a metric's name", nullable=True),
    "tune.pruning": FLAG,
    "tune.storage": FOLDER._replace(wanted="a file", nullable=True),
}


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
