"""Values that no training could use, refused before any work with the key and a remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, get_args

from omegaconf import DictConfig, OmegaConf

from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.norms.slots import Act, Conv, Placement
from normexp.studies.folders import CUSTOM_GROUPS
from normexp.studies.kinds import as_typed
from normexp.studies.place import place_among

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
