"""Every key of the command line: its type and range, its unit, and whether an id contains it.

A new key takes a line in conf/config.yaml (default and meaning), one in `KEYS`, and code that reads
it. Knobs of norms, models and data are checked by the signatures that they go to.
"""

# ruff: noqa: UP045 (types as values)

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from normexp.config.sizes import SIZES, Sizes
from normexp.config.slots import Act, Conv, Placement
from normexp.config.words import as_typed, join_or, suggest
from normexp.errors import UserError

MISSING = "???"  # in a config: a value that must be given
PARTS = ("norm", "model", "data", "optim")  # of every cell; their targets say what they take
OPTIONAL_GROUPS = ("schedule", "callback")  # a training may have none
CUSTOM_GROUPS = (*PARTS, *OPTIONAL_GROUPS)  # take `<group>=custom <group>._target_=...`
GROUPS = (*CUSTOM_GROUPS, "trainer", "logger", "experiment")
OPEN = (*CUSTOM_GROUPS, "logger", "experiment")  # groups of any keys
NOT_IN_IDENTITY = ("hydra", "experiment", "logger", "tune")  # groups that define no training
BUDGETS = ("samples", "epochs", "steps")  # a training has one; the others follow from it
LONGEST_NAME = 200  # bytes; file systems allow 255, and derived names are longer


def _distinct(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("must be a list of different values")
    return values


def _name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", text) or len(text.encode()) > LONGEST_NAME:
        raise ValueError(
            "must be a folder name of letters, digits, dot, plus, dash and underscore, of at most "
            f"{LONGEST_NAME} bytes"
        )
    return text


Count = Annotated[int, Field(gt=0)]
Several = Annotated[int, Field(gt=1)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, AfterValidator(_name)]
Folder = Annotated[Text, AfterValidator(os.path.expanduser)]
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
NormsOfSites = Annotated[dict[Text, Name], Field(min_length=1)]
Words = list[str]
Group = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """A key of the config; one that a YAML leaves out is null.

    Attributes:
        kind: a type of pydantic, checked strictly.
        unit: as in the key's comment in config.yaml.
        in_id: False for where, when or how a cell is trained.
    """

    kind: Any
    unit: str = ""
    in_id: bool = True


SLOTS: dict[str, Any] = {
    **{"act": Act | None, "conv": Conv | None, "placement": Placement | None},
    **dict.fromkeys(("residual_scale", "layer_scale"), float | None),
    **dict.fromkeys(("qk_norm", "v_norm"), bool | None),
}
KEYS = {
    "batch_size": Key(Count, "samples"),
    "micro_batch_size": Key(Count | None, "samples"),
    "norm_batch_size": Key(Count | None, "samples"),
    "epochs": Key(Count),
    "steps": Key(Count | None, "optimizer steps"),
    "samples": Key(Count | None, "samples"),
    "lr": Key(Positive),
    "lr_rule": Key(Literal["none", "linear", "sqrt", "momentum_aware"]),
    "base_batch_size": Key(Count, "samples"),
    "max_grad_norm": Key(Positive | None),
    "seed": Key(Index, in_id=False),
    "replicas": Key(Annotated[int, Field(gt=0, le=10**6)], in_id=False),
    "study": Key(Name, in_id=False),
    "tags": Key(Texts | None, in_id=False),
    "notes": Key(Text | None, in_id=False),
    "dry_run": Key(bool, in_id=False),
    "workers": Key(Index | None, in_id=False),
    "fail_fast": Key(bool, in_id=False),
    "runs_dir": Key(Text, in_id=False),
    "data_dir": Key(Text, in_id=False),
    "eps": Key(Annotated[float, Field(ge=0, le=1000)]),
    **{slot: Key(kind) for slot, kind in SLOTS.items()},
    "matmul_precision": Key(Literal["highest", "high", "medium"]),
    "drop_last": Key(bool),
    "val_every_epochs": Key(Count, "epochs", in_id=False),
    "log_every": Key(Count, "optimizer steps", in_id=False),
    "chunk": Key(Count, "optimizer steps", in_id=False),
    "stack": Key(Literal["auto", True, False], in_id=False),
    "compile": Key(bool, in_id=False),
    "cuda_graph": Key(bool, in_id=False),
    "save_weights": Key(bool, in_id=False),
    "evaluate_with": Key(Statistics, in_id=False),
    "precise_samples": Key(Several, "samples", in_id=False),
    "evaluate_batch_sizes": Key(Counts | None, "samples", in_id=False),
    "evaluate_every_epoch": Key(bool, in_id=False),
    "allow_leak": Key(bool, in_id=False),
    "tune.points": Key(Count, in_id=False),
    "tune.seeds": Key(Several, in_id=False),
    "tune.first_seed": Key(Index, in_id=False),
    "tune.metric": Key(Text | None, in_id=False),
    "norm.at": Key(Optional[NormsOfSites]),
    "norm.half_life": Key(Positive | None, "samples"),
    "norm.mixes_samples": Key(bool | None, in_id=False),  # both count in norm_batch_size
    "norm.synchronized": Key(bool | None, in_id=False),
    **{f"norm.{slot}": Key(kind) for slot, kind in SLOTS.items()},
    "model.weights": Key(Text | None),
    "model.replace": Key(Texts | None),
    "data.limit_train": Key(Count | None, "samples, for texts blocks"),
    "data.order": Key(Literal["shuffled", "sorted"] | None),
    "data.data_dir": Key(Text | None, in_id=False),
    "data.path": Key(Text | None),
    "data.root": Key(Text | None),
    "optim.momentum": Key(Fraction | None),
    "optim.nesterov": Key(bool | None),
    "optim.weight_decay": Key(NotNegative),
    "optim.decay_norm": Key(bool),
    "optim.decay_bias": Key(bool | None),
    "optim.fused": Key(bool | None),
    "optim.schedule": Key(Literal["constant", "cosine", "linear", "wsd", "one_cycle"]),
    "optim.warmup": Key(Fraction),
    "trainer.accelerator": Key(Literal["auto", "cpu", "gpu", "cuda"], in_id=False),
    "trainer.devices": Key(Count, in_id=False),  # counted in norm_batch_size: a share of a
    "trainer.num_nodes": Key(Count, in_id=False),  # forward pass is a ghost sub-batch
    "trainer.strategy": Key(Literal["auto", "ddp"], in_id=False),
    "trainer.precision": Key(Literal["32-true", "bf16-mixed", "64-true"]),
}
TREES = {  # keys above others
    **{group: Key(Group) for group in (*PARTS, "trainer")},
    **{f"{group}._target_": Key(Text) for group in PARTS},
    **{group: Key(Group | None) for group in OPTIONAL_GROUPS},
    **{group: Key(Group, in_id=False) for group in ("logger", "tune")},
    "experiment": Key(Text | None, in_id=False),
}
_ALL = TREES | KEYS

# The keys of the entries without a config; conf/entries.yaml has their defaults and meanings.
OPTIONS: dict[str, dict[str, Any]] = {
    "benchmark": {"reference": Folder, "workloads": Optional[Names], "runs_dir": Folder},
    "check": {"part": Literal["all", "contract"], "format": Literal["table", "json"]},
    "evaluate": {
        "run": Folder,
        "evaluate_with": Optional[Statistics],
        "precise_samples": Several,
        "evaluate_batch_sizes": Optional[Counts],
    },
    "report": {
        "study": Optional[Names],
        "runs_dir": Folder,
        "metric": Optional[Text],
        "tolerance": Optional[NotNegative],
        "reference": Optional[Text],
        "watch": bool,
    },
    "status": {"study": Name, "runs_dir": Folder},
}


def is_read(key: str) -> bool:
    """True if something reads a dotted key: normexp, or the target of its group."""
    return key in _ALL or key.partition(".")[0] in OPEN


def in_identity(key: str) -> bool:
    """True if a dotted key, of normexp or of a user's module, is part of the identity."""
    return _ALL[key].in_id if key in _ALL else key.partition(".")[0] not in NOT_IN_IDENTITY


def value_at(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def validate(config: Mapping[str, Any]) -> None:
    """Checks the values of a cell that need neither data nor model. Raises UserError."""
    validate_keys(config)
    statistics, sizes = config["evaluate_with"], config["evaluate_batch_sizes"]
    if sizes and "batch" not in statistics:
        raise UserError(
            f"evaluate_batch_sizes={as_typed(sizes)}: only batch statistics use it; add batch, as "
            f"in evaluate_with={as_typed([*statistics, 'batch'])}"
        )
    trainer = config["trainer"]
    devices = trainer["devices"] * trainer["num_nodes"]
    if devices > 1 and trainer["strategy"] != "ddp":
        typed = f"trainer.devices={trainer['devices']} trainer.num_nodes={trainer['num_nodes']}"
        raise UserError(f"{typed}: several devices need trainer=ddp")
    Sizes(*(config[key] for key in SIZES)).shared_by(devices)


def validate_keys(config: Mapping[str, Any], keys: Iterable[str] = _ALL) -> None:
    """Checks the values of these keys. Raises UserError for the first that is refused."""
    for key in keys:
        check_value(key, value_at(config, key), _ALL[key].kind, _ALL[key].unit)


def check_value(key: str, value: Any, kind: Any, unit: str = "") -> Any:
    """The value, as a type of this module. Raises UserError for one that the type refuses."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as invalid:
        said = invalid.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    said = re.sub(r"^\w+ should", "must", said).replace("a valid integer", "a whole number")
    said = said.replace("a valid dictionary", "a group of keys").replace("a valid ", "a ")
    remedy = f"; set {key}=..." if value is None else ""
    raise UserError(f"{key}={as_typed(value)}: {said}{unit and f' ({unit})'}{remedy}")


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
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


# What other tools call our keys, by the last part of each name.
OTHER_NAMES = {
    **dict.fromkeys(("seeds", "num_seeds"), "replicas"),
    **dict.fromkeys(("max_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps"), "steps"),
    **{"learning_rate": "lr", "num_workers": "workers", "gpus": "devices"},
    **{"gradient_clip_val": "max_grad_norm", "accumulate_grad_batches": "micro_batch_size"},
}


def unknown_key(key: str, known: Iterable[str], choice: str = "") -> UserError:
    """The error for a key that nothing reads, or a `choice` lacks, with the nearest known ones."""
    known, leaf = list(known), key.rpartition(".")[2]
    leaves = (leaf, OTHER_NAMES.get(leaf))
    same = [name for name in known if name.rpartition(".")[2] in leaves]
    hint = f"did you mean {join_or(same)}?" if same else suggest(key, known, most=2)
    of = f" of {choice}" if choice else ""
    return UserError(f"{key}: unknown key{of}; {hint or '--help lists the keys'}")


def name_as_text(word: str) -> str:
    """The word, with quotes for names of studies that would be read as numbers, as 2026_11."""
    if not re.fullmatch(r"study=[\[\w.+,\]-]*", word):
        return word
    return re.sub(r"(?<=[=,\[])[\d.][\w.+-]*", lambda name: f"'{name[0]}'", word)


# --- The shipped YAMLs ----------------------------------------------------------------------------


def conf_dir() -> Path:
    """The folder of the shipped YAMLs: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"normexp is installed without its conf folder (beside {package})")


def group_choices(group: str, folder: Path | None = None) -> list[str]:
    """The names that `group=` takes, sorted; those of another folder of YAMLs, if given."""
    folder = (folder or conf_dir()) / group
    names = {file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml")}
    return sorted(names - {"claims"})  # conf/experiment/claims.yaml is read and not trained
