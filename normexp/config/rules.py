"""Every key of the command line: its values, its unit, and whether it defines a training.

A new knob takes a line in conf/config.yaml (default and meaning), a field of `Training`, and code
that reads it. The schema only checks: an id hashes the composed config.
"""

# ruff: noqa: UP045 (types as values)

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, Optional

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from normexp.batching.sizes import Sizes
from normexp.errors import UserError
from normexp.norms.slots import Act, Conv, Placement

MISSING = "???"  # in a config: a value that must be given
PARTS = ("norm", "model", "data", "optim")  # of every cell; their targets say what they take
OPTIONAL_GROUPS = ("schedule", "callback")  # a training may have none
OPEN = (*OPTIONAL_GROUPS, "logger", "experiment")  # groups of any keys
NOT_IN_IDENTITY = ("hydra", "experiment", "logger", "tune")  # groups that define no training


def _distinct(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("must be a list of different values")
    return values


def _target(path: str) -> str:
    if path in ("", MISSING):
        raise ValueError("must name a class or function, as my_package.MyClass")
    return path


def _name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", text) or len(text.encode()) > LONGEST_NAME:
        raise ValueError(
            "must be a folder name of letters, digits, dot, plus, dash and underscore, of at most "
            f"{LONGEST_NAME} bytes"
        )
    return text


LONGEST_NAME = 200  # file systems allow 255, and derived names are longer
Count = Annotated[int, Field(gt=0)]
Several = Annotated[int, Field(gt=1)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, AfterValidator(_name)]
Counts = Annotated[list[Count], Field(min_length=1), AfterValidator(_distinct)]
Texts = Annotated[list[Text], Field(min_length=1), AfterValidator(_distinct)]
Statistic = Literal["running", "precise", "own_share", "batch"]
Statistics = Annotated[list[Statistic], Field(min_length=1), AfterValidator(_distinct)]
Names = Annotated[
    list[Name],
    Field(min_length=1),
    AfterValidator(_distinct),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
INDEX, WORDS = Index, list[str]
PLACE = object()  # marks a key of where, when or how a cell is trained, which its id leaves out
# A text among the marks is the unit, as in the key's comment in config.yaml.


class Keys(BaseModel):
    """Keys of the config; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Part(BaseModel):
    """Keys of a group whose other keys go to a class or function, which checks their names."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    target: Annotated[str, Field(alias="_target_"), AfterValidator(_target)]


class Slots(Keys):
    """The parts around a norm; its YAML may set their defaults, below `norm`."""

    act: Act | None = None
    conv: Conv | None = None
    residual_scale: float | None = None
    layer_scale: float | None = None
    placement: Placement | None = None
    qk_norm: bool | None = None
    v_norm: bool | None = None


class Norm(Part, Slots):
    model_config = ConfigDict(extra="allow")
    half_life: Annotated[Positive | None, "samples"] = None
    mixes_samples: Annotated[bool | None, PLACE] = None  # counted in norm_batch_size
    synchronized: Annotated[bool | None, PLACE] = None  # counted in norm_batch_size


class Model(Part):
    weights: Text | None = None
    replace: Texts | None = None


class Dataset(Part):
    limit_train: Annotated[Count | None, "samples, for texts blocks"] = None
    order: Literal["shuffled", "sorted"] = "shuffled"
    data_dir: Annotated[Text, PLACE] = "data"
    path: Text = "-"
    root: Text = "-"


class Optim(Part):
    weight_decay: NotNegative
    decay_norm: bool
    decay_bias: bool = True
    momentum: Fraction = 0.0
    nesterov: bool = False
    fused: bool | None = None
    shape: Annotated[
        Literal["constant", "cosine", "linear", "wsd", "one_cycle"], Field(alias="schedule")
    ]
    warmup: Fraction


class Trainer(Keys):
    accelerator: Annotated[Literal["auto", "cpu", "gpu", "cuda"], PLACE]
    devices: Annotated[Count, PLACE]  # counted in norm_batch_size: a share of a
    num_nodes: Annotated[Count, PLACE]  # forward pass is a ghost sub-batch
    strategy: Annotated[Literal["auto", "ddp"], PLACE]
    precision: Literal["32-true", "bf16-mixed", "64-true"]


class Tune(Keys):
    points: Annotated[Count, PLACE]
    seeds: Annotated[Several, PLACE]
    first_seed: Annotated[Index, PLACE]
    metric: Annotated[Text | None, PLACE]


class Training(Slots):
    """The config of a cell."""

    norm: Norm
    model: Model
    data: Dataset
    optim: Optim
    schedule: dict[str, Any] | None = None
    callback: dict[str, Any] | None = None
    trainer: Trainer
    logger: Annotated[dict[str, Any] | None, PLACE] = None
    experiment: Annotated[Any, PLACE] = None
    batch_size: Annotated[Count, "samples"]
    micro_batch_size: Annotated[Count | None, "samples"]
    norm_batch_size: Annotated[Count | None, "samples"]
    epochs: Count
    steps: Annotated[Count | None, "optimizer steps"]
    samples: Annotated[Count | None, "samples"]
    lr: Positive
    lr_rule: Literal["none", "linear", "sqrt", "momentum_aware"]
    base_batch_size: Annotated[Count, "samples"]
    max_grad_norm: Positive | None
    seed: Annotated[Index, PLACE]
    replicas: Annotated[int, Field(gt=0, le=10**6), PLACE]
    study: Annotated[Name, PLACE]
    tags: Annotated[Texts | None, PLACE]
    notes: Annotated[Text | None, PLACE]
    dry_run: Annotated[bool, PLACE]
    workers: Annotated[Index | None, PLACE]
    fail_fast: Annotated[bool, PLACE]
    runs_dir: Annotated[Text, PLACE]
    data_dir: Annotated[Text, PLACE]
    eps: Annotated[float, Field(ge=0, le=1000)]
    matmul_precision: Literal["highest", "high", "medium"]
    drop_last: bool
    val_every_epochs: Annotated[Count, "epochs", PLACE]
    log_every: Annotated[Count, "optimizer steps", PLACE]
    chunk: Annotated[Count, "optimizer steps", PLACE]
    stack: Annotated[Literal["auto", True, False], PLACE]
    compile: Annotated[bool, PLACE]
    save_weights: Annotated[bool, PLACE]
    evaluate_with: Annotated[Statistics, PLACE]
    precise_samples: Annotated[Several, "samples", PLACE]
    evaluate_batch_sizes: Annotated[Counts | None, "samples", PLACE]
    evaluate_every_epoch: Annotated[bool, PLACE]
    allow_leak: Annotated[bool, PLACE]
    tune: Tune


def _keys_of(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in schema.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if name == "target" or key in OPEN:
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys_of(field.annotation, f"{key}.")
        else:
            yield key, field


KEYS = dict(_keys_of(Training))
SLOT_KEYS = tuple(Slots.model_fields)


# The keys of the entries without a config; conf/entries.yaml has their defaults and meanings.
OPTIONS: dict[str, dict[str, Any]] = {
    "benchmark": {"reference": Text, "workloads": Optional[Names], "runs_dir": Text},
    "check": {"part": Literal["all", "contract"], "format": Literal["table", "json"]},
    "evaluate": {
        "run": Text,
        "evaluate_with": Optional[Statistics],
        "precise_samples": Several,
        "evaluate_batch_sizes": Optional[Counts],
    },
    "report": {
        "study": Names,
        "runs_dir": Text,
        "metric": Optional[Text],
        "tolerance": Optional[NotNegative],
        "reference": Optional[Text],
        "watch": bool,
    },
    "status": {"study": Name, "runs_dir": Text},
}


def is_read(key: str) -> bool:
    """True if something reads a dotted key: a field of `Training`, or a target."""
    return key in KEYS or key.partition(".")[0] in (*PARTS, *OPEN)


def in_identity(key: str) -> bool:
    """True if a dotted key, of normexp or of a user's module, is part of the identity."""
    field = KEYS.get(key)
    return PLACE not in field.metadata if field else key.partition(".")[0] not in NOT_IN_IDENTITY


def sees_validations(config: Mapping[str, Any]) -> bool:
    """True if a callback or schedule may act on validations, and they skip epochs."""
    acts = config.get("callback") is not None or config.get("schedule") is not None
    return acts and config["val_every_epochs"] != 1


def validate(config: Mapping[str, Any]) -> None:
    """Checks the values of a cell that need neither data nor model. Raises UserError."""
    optim = config.get("optim") or {}
    if config["lr"] is None and optim.get("default_lr") is None:
        raise UserError("lr=null: this optimizer has no default; set lr=...")
    validate_keys(config)
    sizes = Sizes(config["batch_size"], config["micro_batch_size"], config["norm_batch_size"])
    sizes.shared_by(_num_devices(config["trainer"]))


def validate_keys(config: Mapping[str, Any], keys: Iterable[str] | None = None) -> None:
    """Checks the values of these keys, by default of all. Raises UserError for the first."""
    try:
        Training.model_validate(config)
    except ValidationError as invalid:
        wanted = None if keys is None else set(keys)
        for error in invalid.errors(include_url=False):
            key = ".".join(str(name) for name in error["loc"] if isinstance(name, str))
            if wanted is None or key in wanted:
                raise _explain(key, _value_of(config, key), error) from None


def check_value(key: str, value: Any, kind: Any, unit: str = "") -> Any:
    """The value, as a type of this module. Raises UserError for one that the type refuses."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
        raise _explain(key, value, error, unit) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def _value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name)
    return config


def _explain(key: str, value: Any, error: Any, unit: str = "") -> UserError:
    """The error of one key in one line: key, value, and what it takes."""
    if error["type"] == "missing":
        return UserError(f"{key} is missing; set {key}=...")
    if error["type"] == "extra_forbidden":
        return unknown_key(key, KEYS)
    said = str(error["msg"]).removeprefix("Value error, ")
    said = (
        re.sub(r"^\w+ should", "must", said)
        .replace("a valid integer", "a whole number")
        .replace("a valid ", "a ")
    )
    if error["type"] == "model_type":
        said = "must be a group of keys; a YAML chooses one below `defaults:`"
    units = [mark for mark in KEYS[key].metadata if isinstance(mark, str)] if key in KEYS else []
    unit = next(iter([*units, unit]))
    return UserError(f"{key}={as_typed(value)}: {said}{unit and f' ({unit})'}")


def unknown_key(key: str, known: Iterable[str]) -> UserError:
    """The error for a key that nothing reads, with the nearest known ones."""
    known, leaf = list(known), key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == leaf]
    hint = f"did you mean {join_or(same)}?" if same else suggest(key, known, most=2)
    return UserError(f"{key}: unknown key; {hint or '--help lists the keys'}")


def _num_devices(trainer: Mapping[str, Any]) -> int:
    """Devices on all nodes. Refuses several devices without a strategy."""
    devices, num_nodes = trainer["devices"], trainer["num_nodes"]
    if devices * num_nodes > 1 and trainer["strategy"] != "ddp":
        key = "devices" if devices > 1 else "num_nodes"
        raise UserError(f"trainer.{key}={trainer[key]}: several devices need trainer=ddp")
    return devices * num_nodes


def refuse_type_change(key: str, default: Any, value: Any) -> None:
    """Refuses a value of another type than its default; a null or text default allows any."""
    if default is None or value is None or isinstance(default, str):
        return
    kinds = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
        shown = "a group of keys" if isinstance(default, dict) else as_typed(default)
        raise UserError(f"{key}={as_typed(value)}: must be of the type of its default, {shown}")


def name_as_text(word: str) -> str:
    """The word, with quotes for names of studies that would be read as numbers, as 2026_11."""
    if not re.fullmatch(r"study=[\[\w.+,\]-]*", word):
        return word
    return re.sub(r"(?<=[=,\[])[\d.][\w.+-]*", lambda name: f"'{name[0]}'", word)


# --- Words of messages ----------------------------------------------------------------------------


def as_typed(value: Any) -> str:
    """A value as typed on the command line: null, true, false, 3, [2,8]."""
    if value is None:
        return "null"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(as_typed, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


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
