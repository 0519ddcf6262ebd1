"""Every key of the command line: its values, its unit, and whether it defines a training.

A new knob takes a line in conf/config.yaml (default and meaning), a line in `KEYS`, and code that
reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any, get_args

from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.norms.slots import Act, Conv, Placement

LONGEST_NAME = 200  # bytes; file systems allow 255, and derived names are longer


def as_typed(value: Any) -> str:
    """A value as typed on the command line: null, true, false, 3, [2,8]."""
    if value is None:
        return "null"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(as_typed, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Rule:
    """The values that a key takes.

    Attributes:
        holds: tests a value.
        wanted: describes the values in messages.
        choices: all values as typed, if they are few.
    """

    holds: Callable[[Any], bool]
    wanted: str
    choices: tuple[str, ...] = ()

    def or_null(self) -> Rule:
        wanted, choices = f"{self.wanted} or null", (*self.choices, "null") if self.choices else ()
        return Rule(lambda value: value is None or self.holds(value), wanted, choices)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_name(value: Any) -> bool:
    is_text = isinstance(value, str) and re.fullmatch(r"\w[\w.+-]*", value) is not None
    return is_text and len(value.encode()) <= LONGEST_NAME


def one_of(*choices: str | bool) -> Rule:
    kinds = tuple({type(choice) for choice in choices})
    typed = tuple(map(as_typed, choices))
    wanted = f"one of {', '.join(typed)}"
    return Rule(lambda value: isinstance(value, kinds) and value in choices, wanted, typed)


def list_of(rule: Rule) -> Rule:
    """A list of one or more different values that `rule` accepts."""

    def holds(value: Any) -> bool:
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            return False
        return all(map(rule.holds, value)) and len(set(value)) == len(value)

    wanted = f"a list of different values in brackets, each {rule.wanted}"
    return Rule(holds, wanted, rule.choices)


COUNT = Rule(lambda v: _is_whole(v) and v > 0, "a whole number above 0")
SEVERAL = Rule(lambda v: _is_whole(v) and v > 1, "a whole number above 1")
INDEX = Rule(lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more")
NUMBER = Rule(_is_number, "a number")
POSITIVE = Rule(lambda v: _is_number(v) and v > 0, "a number above 0")
NOT_NEGATIVE = Rule(lambda v: _is_number(v) and v >= 0, "a number, 0 or more")
EPS = Rule(lambda v: _is_number(v) and 0 <= v <= 1000, "a number from 0 to 1000, such as 1e-5")
FRACTION = Rule(lambda v: _is_number(v) and 0 <= v < 1, "a number from 0 to below 1")
SHARE = Rule(lambda v: _is_number(v) and 0 < v < 1, "a number between 0 and 1")
FLAG = Rule(lambda v: isinstance(v, bool), "true or false", ("true", "false"))
TEXT = Rule(lambda v: isinstance(v, str) and v != "", "a text")
WORDS = Rule(
    lambda v: isinstance(v, list | tuple) and all(isinstance(word, str) for word in v),
    "a list of words, as in ['norm=group', 'lr=0.3']",
)
FOLDER = Rule(TEXT.holds, "a folder")
NAME = Rule(
    _is_name,
    "a folder name of letters, digits, dot, plus, dash and underscore, "
    f"of at most {LONGEST_NAME} bytes",
)


@dataclass(frozen=True)
class Key:
    """A key of the config.

    Attributes:
        unit: of its value, the same as in its comment in config.yaml.
        identity: True if the value defines the training, so that another value is another cell.
            False if it only sets where a training runs and how it is watched.
    """

    rule: Rule
    unit: str = ""
    identity: bool = True


SLOT_KEYS = {
    "act": Key(one_of(*get_args(Act)).or_null()),
    "conv": Key(one_of(*get_args(Conv)).or_null()),
    "residual_scale": Key(NUMBER.or_null()),
    "layer_scale": Key(NUMBER.or_null()),
    "placement": Key(one_of(*get_args(Placement)).or_null()),
    "qk_norm": Key(FLAG.or_null()),
    "v_norm": Key(FLAG.or_null()),
}

KEYS = {
    "batch_size": Key(COUNT, "samples"),
    "micro_batch_size": Key(COUNT.or_null(), "samples"),
    "norm_batch_size": Key(COUNT.or_null(), "samples"),
    "epochs": Key(COUNT),
    "steps": Key(COUNT.or_null(), "optimizer steps"),
    "samples": Key(COUNT.or_null(), "samples"),
    "lr": Key(POSITIVE),
    "lr_rule": Key(one_of("none", "linear", "sqrt", "momentum_aware")),
    "base_batch_size": Key(COUNT, "samples"),
    "max_grad_norm": Key(POSITIVE.or_null()),
    "seed": Key(INDEX, identity=False),
    "replicas": Key(
        Rule(lambda v: COUNT.holds(v) and v <= 10**6, "a whole number from 1 to 1000000"),
        identity=False,
    ),
    "study": Key(NAME, identity=False),
    "tags": Key(list_of(TEXT).or_null(), identity=False),
    "notes": Key(TEXT.or_null(), identity=False),
    "dry_run": Key(FLAG, identity=False),
    "workers": Key(INDEX.or_null(), identity=False),
    "fail_fast": Key(FLAG, identity=False),
    "retry_failed": Key(FLAG, identity=False),
    "max_attempts": Key(COUNT, "attempts", identity=False),
    "runs_dir": Key(FOLDER, identity=False),
    "data_dir": Key(FOLDER, identity=False),
    "eps": Key(EPS),
    **SLOT_KEYS,
    "matmul_precision": Key(one_of("highest", "high", "medium")),
    "drop_last": Key(FLAG),
    "val_every_epochs": Key(COUNT, "epochs", identity=False),
    "log_every": Key(COUNT, "optimizer steps", identity=False),
    "chunk": Key(COUNT, "optimizer steps", identity=False),
    "stack": Key(one_of("auto", True, False), identity=False),
    "compile": Key(FLAG, identity=False),
    "save_weights": Key(FLAG, identity=False),
    "evaluate_with": Key(
        list_of(one_of("running", "precise", "own_share", "batch")), identity=False
    ),
    "precise_samples": Key(SEVERAL, "samples", identity=False),
    "evaluate_batch_sizes": Key(list_of(COUNT).or_null(), "samples", identity=False),
    "evaluate_every_epoch": Key(FLAG, identity=False),
    "allow_leak": Key(FLAG, identity=False),
    "tune.points": Key(COUNT, identity=False),
    "tune.seeds": Key(SEVERAL, identity=False),
    "tune.first_seed": Key(INDEX, identity=False),
    "tune.metric": Key(TEXT.or_null(), identity=False),
    # Keys of groups; not every choice has them.
    **{f"norm.{name}": key for name, key in SLOT_KEYS.items()},
    "norm.half_life": Key(POSITIVE.or_null(), "samples"),
    "norm.mixes_samples": Key(FLAG.or_null(), identity=False),  # false: norm_batch_size counts not
    "norm.synchronized": Key(FLAG.or_null(), identity=False),  # counted in norm_batch_size
    "model.weights": Key(TEXT.or_null()),
    "model.replace": Key(list_of(TEXT).or_null()),
    "data.limit_train": Key(COUNT.or_null(), "samples, for texts blocks"),
    "data.order": Key(one_of("shuffled", "sorted")),
    "data.data_dir": Key(FOLDER, identity=False),
    "data.path": Key(FOLDER),
    "data.root": Key(FOLDER),
    "optim.momentum": Key(FRACTION),
    "optim.nesterov": Key(FLAG),
    "optim.weight_decay": Key(NOT_NEGATIVE),
    "optim.decay_norm": Key(FLAG),
    "optim.decay_bias": Key(FLAG),
    "optim.fused": Key(FLAG),
    "optim.schedule": Key(one_of("constant", "cosine", "linear", "wsd", "one_cycle")),
    "optim.warmup": Key(FRACTION),
    "trainer.accelerator": Key(one_of("auto", "cpu", "gpu", "cuda"), identity=False),
    "trainer.devices": Key(COUNT, identity=False),  # counted in norm_batch_size: a share of a
    "trainer.num_nodes": Key(COUNT, identity=False),  # forward pass is a ghost sub-batch
    "trainer.strategy": Key(one_of("auto", "ddp"), identity=False),
    "trainer.precision": Key(one_of("32-true", "bf16-mixed", "64-true")),
}
NOT_IN_IDENTITY = ("hydra", "experiment", "logger", "tune")  # groups that define no training
REQUIRED_OF_OPTIM = ("_target_", "weight_decay", "decay_norm", "schedule", "warmup")

MISSING = "???"  # in a config: a value that must be given
OPTIONAL_GROUPS = ("schedule", "callback")  # a training may have none
PARTS = ("norm", "model", "data", "optim")  # of every cell; their targets say what they take

# Keys of Lightning and other tools, and what does the same here.
FOREIGN_KEYS = {
    **dict.fromkeys(("max_epochs", "num_epochs", "min_epochs"), "set epochs=..."),
    **dict.fromkeys(("max_steps", "min_steps", "fast_dev_run"), "set steps=..."),
    **dict.fromkeys(
        ("limit_train_batches", "overfit_batches"), "set steps=... or data.limit_train=..."
    ),
    **dict.fromkeys(
        ("limit_val_batches", "limit_test_batches"),
        "the val and test splits are always evaluated whole",
    ),
    **dict.fromkeys(("gradient_clip_val", "grad_clip", "clip"), "set max_grad_norm=..."),
    **dict.fromkeys(("accumulate_grad_batches", "grad_accum"), "set micro_batch_size=..."),
    **dict.fromkeys(("check_val_every_n_epoch", "val_check_interval"), "set val_every_epochs=..."),
    **dict.fromkeys(("ckpt_path", "resume"), "the same command resumes by itself"),
    **dict.fromkeys(("default_root_dir", "output_dir"), "set runs_dir=..."),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "set optim.schedule=... or schedule=custom"),
    **dict.fromkeys(("callbacks", "early_stopping"), "set callback=early_stopping or custom"),
    **dict.fromkeys(("tags", "notes"), "set tags=[...] or notes=...; every logger gets them"),
    "log_every_n_steps": "set log_every=...",
    "debug": "set experiment=debug",
    "precision": "set trainer.precision=32-true, bf16-mixed or 64-true",
    "sync_batchnorm": "set norm=sync",
    "optimizer": "set optim=...",
    "learning_rate": "set lr=...",
    **dict.fromkeys(("gpus", "device", "cuda"), "set trainer=gpu or trainer=cpu"),
    **dict.fromkeys(("seeds", "num_seeds", "repeats"), "set replicas=..., the number of seeds"),
}


def is_read(key: str) -> bool:
    """True if something reads a dotted key: one of `KEYS`, a group of them, or a target."""
    if key.partition(".")[0] in (*PARTS, *OPTIONAL_GROUPS, "logger") or key in KEYS:
        return True
    return any(name.startswith(f"{key}.") for name in KEYS)


def in_identity(key: str) -> bool:
    """True if a dotted key, in `KEYS` or of a user's module, is part of the identity."""
    known = KEYS.get(key)
    return known.identity if known else key.partition(".")[0] not in NOT_IN_IDENTITY


def sees_validations(config: Mapping[str, Any]) -> bool:
    """True if a callback or schedule may act on validations, and they skip epochs."""
    acts = config.get("callback") is not None or config.get("schedule") is not None
    return acts and config["val_every_epochs"] != 1


# The keys of the entries without a config; conf/entries.yaml has their defaults and meanings.
OPTIONS: dict[str, dict[str, Rule]] = {
    "benchmark": {
        "reference": TEXT,
        "workloads": list_of(NAME).or_null(),
        "runs_dir": FOLDER,
    },
    "check": {"part": one_of("all", "contract"), "format": one_of("table", "json")},
    "evaluate": {
        "run": FOLDER,
        "evaluate_with": KEYS["evaluate_with"].rule.or_null(),
        "precise_samples": KEYS["precise_samples"].rule,
        "evaluate_batch_sizes": KEYS["evaluate_batch_sizes"].rule,
    },
    "report": {
        "study": list_of(NAME),
        "runs_dir": FOLDER,
        "metric": TEXT.or_null(),
        "tolerance": NOT_NEGATIVE.or_null(),
        "reference": TEXT.or_null(),
        "watch": FLAG,
    },
    "status": {"study": NAME, "runs_dir": FOLDER, "forget": list_of(TEXT).or_null()},
}


def validate(config: Mapping[str, Any]) -> None:
    """Checks the values of a cell that need neither data nor model. Raises UserError."""
    for group in ("norm", "model", "data"):
        if group not in config:  # its YAML says `@package _global_` and puts its keys at the top
            raise UserError(
                f"{group} is missing: put the keys of its YAML under `{group}:`, or drop the line "
                "`# @package _global_`"
            )
        if config[group].get("_target_") in (None, "", MISSING):
            raise UserError(
                f"{group}._target_ is missing: name a class or function, as in "
                f"{group}._target_=my_package.MyClass, and its knobs as {group}.<knob>=..."
            )
    for key in REQUIRED_OF_OPTIM:
        if key not in config["optim"]:
            raise UserError(
                f"optim.{key} is missing: set it in the optimizer's YAML, as in conf/optim"
            )
    if config["lr"] is None and config["optim"].get("default_lr") is None:
        raise UserError(
            "lr=null: must be a number above 0; this optimizer has no default, set lr=..."
        )
    validate_keys(config, KEYS)
    sizes = Sizes(config["batch_size"], config["micro_batch_size"], config["norm_batch_size"])
    sizes.shared_by(_num_devices(config["trainer"]))


def _num_devices(trainer: Mapping[str, Any]) -> int:
    """Devices on all nodes. Refuses several devices without a strategy."""
    devices, num_nodes = trainer["devices"], trainer["num_nodes"]
    if devices * num_nodes > 1 and trainer["strategy"] != "ddp":
        key = "devices" if devices > 1 else "num_nodes"
        raise UserError(f"trainer.{key}={trainer[key]}: several devices need trainer=ddp")
    return devices * num_nodes


def validate_keys(config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Checks the values of `keys` one by one. Raises UserError."""
    for key in keys:
        *groups, name = key.split(".")
        level: Any = config
        for group in groups:
            level = level.get(group) or {}
        if level.get(name, MISSING) != MISSING:
            check_value(key, level[name], KEYS[key].rule, KEYS[key].unit)
        elif not groups:  # another choice of a group may lack a knob
            raise UserError(f"{key} is missing: it must be {KEYS[key].rule.wanted}")


def check_value(key: str, value: Any, rule: Rule, unit: str = "") -> None:
    """Raises UserError for a value that `rule` does not accept."""
    if not rule.holds(value):
        unit = f" ({unit})" if unit else ""
        raise UserError(f"{key}={as_typed(value)}: must be {rule.wanted}{unit}")


def refuse_type_change(key: str, default: Any, value: Any) -> None:
    """Refuses a value of another type than its default: bool, number, list or group of keys.

    A null or text default allows any type.
    """
    like = next((rule for kind, rule in LIKE_DEFAULT.items() if isinstance(default, kind)), None)
    if like is not None and value is not None and not like.holds(value):
        shown = "" if isinstance(default, dict) else f", as its default {as_typed(default)}"
        raise UserError(f"{key}={as_typed(value)}: must be {like.wanted}{shown}")


# The values of a knob without a rule, by the type of its default; bool first, as it is an int too.
LIKE_DEFAULT: dict[type, Rule] = {
    bool: FLAG,
    int: Rule(_is_whole, "a whole number"),
    float: Rule(lambda v: _is_whole(v) or isinstance(v, float), "a number"),
    list: Rule(lambda v: isinstance(v, list), "a list"),
    dict: Rule(lambda v: isinstance(v, dict), "a group of keys"),
}


def format_count(number: int, word: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def suggest(
    word: str, known: Iterable[str], *, prefix: str = "", most: int = 1, cutoff: float = 0.6
) -> str:
    """`did you mean a or b?` with the known words nearest to `word`; empty if none is near."""
    near = [prefix + name for name in get_close_matches(word, list(known), most, cutoff)]
    return f"did you mean {join_or(near)}?" if near else ""


def join_or(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])
