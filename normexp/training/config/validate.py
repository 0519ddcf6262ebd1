"""Checks the values of a config, and says in one line what is wrong with one."""

# ruff: noqa: UP045 (types as values)

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Optional

from pydantic import TypeAdapter, ValidationError

from normexp.errors import UserError
from normexp.training.config.groups import shipped_targets
from normexp.training.config.keys import (
    KEYS,
    STRICT,
    Columns,
    Count,
    Counts,
    Folder,
    Fraction,
    Group,
    Index,
    Name,
    Names,
    NotNegative,
    Settings,
    Several,
    Statistics,
    Text,
    Views,
    value_at,
)
from normexp.words import as_typed, suggest

# The keys of the entries without a config; conf/entries.yaml has their defaults and meanings.
OPTIONS: dict[str, dict[str, Any]] = {
    "benchmark": {"reference": Folder, "workloads": Optional[Names], "runs_dir": Folder},
    "check": {"part": Literal["all", "contract"], "format": Literal["table", "json"]},
    "confirm": {
        "study": Name,
        "runs_dir": Folder,
        "best": Count,
        "replicas": Several,
        "baseline": Optional[Text],
        "workers": Optional[Index],
        "dry_run": bool,
    },
    "evaluate": {
        "run": Folder,
        "evaluate_with": Optional[Statistics],
        "precise_samples": Several,
        "evaluate_batch_sizes": Optional[Counts],
        "evaluate_at": Optional[Views],
    },
    "report": {
        "study": Optional[Names],
        "runs_dir": Folder,
        "metric": Optional[Text],
        "tolerance": Optional[NotNegative],
        "reference": Optional[Text],
        "tries": Optional[Count],
        "watch": bool,
        **dict.fromkeys(("arm", "seed", "tune", "choose_by"), Optional[Text]),
        **dict.fromkeys(("by", "ignore"), Optional[Columns]),
        "higher_is_better": Optional[bool],
        "chance": Optional[float],
    },
    "status": {"study": Name, "runs_dir": Folder},
}


# What pydantic says, and what this says instead.
OUR_WORDS = {
    r"^Value error, ": "",
    r"^\w+ should": "must",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid dictionary": "a group of keys",
    "a valid ": "a ",
    "have at least 1 .*": "not be empty",
    " after validation, not .*": "",
    "True or False": "true or false",
}


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The typed values of a cell. Raises UserError for one that cannot be trained.

    What needs the data or the model is checked later.
    """
    try:
        settings = Settings.model_validate(config)
    except ValidationError as invalid:
        where = [str(name) for name in invalid.errors(include_url=False)[0]["loc"]]
        while ".".join(where) not in KEYS:  # inside a list, say
            where.pop()
        key = ".".join(where)
        check_value(key, value_at(config, key), KEYS[key].kind, KEYS[key].unit)
        raise
    schedule = config["schedule"]
    if "warmup" in schedule and schedule["_target_"] in shipped_targets("schedule"):
        check_value("schedule.warmup", schedule["warmup"], Fraction)
    statistics, sizes = settings.evaluate_with, settings.evaluate_batch_sizes
    if sizes and "batch" not in statistics:
        raise UserError(
            f"evaluate_batch_sizes={as_typed(sizes)}: only batch statistics use it; add batch, as "
            f"in evaluate_with={as_typed([*statistics, 'batch'])}"
        )
    trainer = settings.trainer
    if trainer.num_processes > 1 and trainer.strategy != "ddp":
        typed = f"trainer.devices={trainer.devices} trainer.num_nodes={trainer.num_nodes}"
        raise UserError(f"{typed}: several devices need trainer=ddp")
    settings.sizes.shared_by(trainer.num_processes)
    return settings


def check_keys(config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Checks the values of these keys alone. Raises UserError for the first that is refused."""
    for key in keys:
        check_value(key, value_at(config, key), KEYS[key].kind, KEYS[key].unit)


def check_value(key: str, value: Any, kind: Any, unit: str = "") -> Any:
    """The value, as a type of keys.py. Raises UserError for one that the type refuses."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as invalid:
        faults = invalid.errors(include_url=False)
    first = faults[0]
    # A value that may have several types has a fault for each.
    rules = [_rule(fault["msg"]) for fault in faults if fault["input"] is first["input"]]
    others = [rule.removeprefix("must be ") for rule in rules[1:]]
    said = " or ".join([rules[0], *others])
    remedy = ""
    if value is None:
        remedy = f"; set {key}=..."
    elif isinstance(value, str) and "," in value and not _why_refused(value.split(","), kind):
        remedy = f"; type {key}=[{value}]"
    elif first["type"] == "list_type":
        of_list = _why_refused([value], kind)
        remedy = f", and [{as_typed(value)}] {of_list}" if of_list else ""
        remedy = remedy or f"; type {key}=[{as_typed(value)}]"
    elif first["type"] == "string_type" and isinstance(first["input"], int | float):
        remedy = f"; quote it, as '\"{as_typed(first['input'])}\"'"
    elif first["type"] in ("int_type", "float_type") and isinstance(first["input"], str):
        with suppress(ValueError):
            float(first["input"])
            remedy = "; it is a text: drop its quotes, or read it with ${oc.decode:${oc.env:NAME}}"
    raise UserError(f"{key}={as_typed(value)}: {said}{unit and f' ({unit})'}{remedy}")


def _why_refused(value: Any, kind: Any) -> str:
    """The rule that a value breaks, empty if there is none."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as invalid:
        return _rule(invalid.errors(include_url=False)[0]["msg"])
    return ""


def _rule(message: str) -> str:
    """A message of pydantic as normexp says it: `must be a whole number`."""
    for theirs, ours in OUR_WORDS.items():
        message = re.sub(theirs, ours, message)
    return message


def takes(key: str, value: Any) -> bool:
    """True if a key may have this value."""
    if key == "logger":
        return True
    try:
        check_value(key, value, KEYS[key].kind)
    except (KeyError, UserError):
        return False
    return True


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    base = getattr(kind, "__origin__", kind)
    is_group = isinstance(base, type) and issubclass(base, Group)  # which has its own config
    return TypeAdapter(kind, config=None if is_group else STRICT)


# What other tools call our keys, by the last part of each name.
OTHER_NAMES = {
    **dict.fromkeys(("seeds", "num_seeds"), "replicas"),
    **dict.fromkeys(("max_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps"), "steps"),
    **{"learning_rate": "lr", "activation": "act", "num_workers": "workers", "gpus": "devices"},
    **{"gradient_clip_val": "max_grad_norm", "accumulate_grad_batches": "micro_batch_size"},
}

MOVED = {"optim.schedule": "schedule", "optim.warmup": "schedule.warmup"}  # former words


class UnknownKey(UserError):
    """Of a key that nothing reads, or that a choice lacks; its message begins with the key."""

    @property
    def key(self) -> str:
        return str(self).partition(":")[0]


def unknown_key(key: str, known: Iterable[str], choice: str = "") -> UnknownKey:
    """The error for a key that nothing reads, or a `choice` lacks, with the nearest known ones."""
    if key in MOVED:
        return UnknownKey(f"{key}: unknown key; the word is {MOVED[key]}=... now")
    known, leaf = list(known), key.rpartition(".")[2]
    leaves = (leaf, OTHER_NAMES.get(leaf))
    same = [name for name in known if name.rpartition(".")[2] in leaves]
    hint = f"did you mean {' or '.join(same)}?" if same else suggest(key, known, most=2)
    of = f" of {choice}" if choice else ""
    return UnknownKey(f"{key}: unknown key{of}; {hint or '--help lists the keys'}")


def name_as_text(word: str) -> str:
    """The word, with quotes for names of studies that would be read as numbers, as 2026_11."""
    if not re.fullmatch(r"study=[\[\w.+,\]-]*", word):
        return word
    return re.sub(r"(?<=[=,\[])[\d.][\w.+-]*", lambda name: f"'{name[0]}'", word)
