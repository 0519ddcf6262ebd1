"""The one table of keys: what each key of a cell may be, and what it means for whom.

A new key takes a line in conf/config.yaml (default and meaning), a line here, and code that reads
it from `Settings`. Knobs of norms, models and data are checked by the signatures that they go to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from normexp.training.config.groups import CUSTOM_GROUPS
from normexp.training.config.sizes import Sizes
from normexp.training.config.slots import Act, Conv, Placement
from normexp.training.records.files import expand_path

MISSING = "???"  # in a config: a value that must be given
OPEN = (*CUSTOM_GROUPS, "logger", "experiment")  # groups of any keys
PATHS = ("runs_dir", "data_dir", "data.data_dir", "data.root", "data.path", "model.weights")
# What an evaluation shows of images, see data/views.py; a stride may not exceed the tile.
VIEW = re.compile(r"whole|[1-9]\d*|tiles(?P<tile>[1-9]\d*)(?:stride(?P<stride>[1-9]\d*))?")
LONGEST_NAME = 200  # bytes; file systems allow 255, and derived names are longer
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


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


def _view(value: Any) -> str:
    text = str(value)
    found = VIEW.fullmatch(text)
    if found is None:
        raise ValueError("must be a list of whole, pixels, or tiles, as in [whole,32,tiles32]")
    tile, stride = found["tile"], found["stride"]
    if stride and int(stride) > int(tile):
        raise ValueError(
            "must leave no pixel out: a stride may not exceed the tile, as in "
            f"tiles{tile}stride{tile}"
        )
    return text


def _list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, Field(gt=0)]
Several = Annotated[int, Field(gt=1)]
Index = Annotated[int, Field(ge=0)]
Replicas = Annotated[int, Field(gt=0, le=10**6)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Eps = Annotated[float, Field(ge=0, le=1000)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, AfterValidator(_name)]
Folder = Annotated[Text, AfterValidator(expand_path)]
Counts = Annotated[list[Count], Field(min_length=1), AfterValidator(_distinct)]
Weights = Annotated[list[NotNegative], Field(min_length=2)]
Texts = Annotated[list[Text], Field(min_length=1), AfterValidator(_distinct)]
Statistic = Literal["running", "precise", "own_share", "batch"]
Statistics = Annotated[list[Statistic], Field(min_length=1), AfterValidator(_distinct)]
Views = Annotated[
    list[Annotated[Any, AfterValidator(_view)]], Field(min_length=1), AfterValidator(_distinct)
]
Names = Annotated[
    list[Name], Field(min_length=1), AfterValidator(_distinct), BeforeValidator(_list)
]
Columns = Annotated[
    list[Text], Field(min_length=1), AfterValidator(_distinct), BeforeValidator(_list)
]
NormsOfSites = Annotated[dict[Text, Name], Field(min_length=1)]
Words = list[str]
# What the running averages of a step in several groups are taken from, see norms/site.py.
RunningFrom = Literal["step", "group", "sequence"]

NO_VALUE = object()


@dataclass(frozen=True)
class Key:
    """What a key means.

    Attributes:
        unit: as in its comment in config.yaml.
        in_id: it defines the training; False for where, when or how a cell is trained.
        implied: ids leave the key out where it has this value, which no YAML sets.
        is_probed: what a network mixes or leaks may depend on it.
        goes_to_target: in a group, it is an argument of the target and not for normexp alone.
        kind: its type with the range of its values, as its line in the table has it.
    """

    unit: str = ""
    in_id: bool = True
    implied: Any = NO_VALUE
    is_probed: bool = True
    goes_to_target: bool = False
    kind: Any = None


NOT_IN_ID = Key(in_id=False)
NOT_PROBED = Key(is_probed=False)
NULL_IS_ABSENT = Key(implied=None)
FOR_TARGET = Key(goes_to_target=True)
SAMPLES, STEPS = "samples", "optimizer steps"


class Group(BaseModel):
    """The keys of normexp's own in a config group; its target takes any others."""

    model_config = STRICT | ConfigDict(extra="allow")


class TargetKeys(Group):
    target: Annotated[Text, FOR_TARGET] = Field(alias="_target_")  # a class or function


class SlotKeys(Group):
    """What surrounds a norm, see config/slots.py; a norm's YAML may set these as well."""

    act: Annotated[Act | None, NULL_IS_ABSENT] = None
    conv: Annotated[Conv | None, NULL_IS_ABSENT] = None
    residual_scale: Annotated[float | None, NULL_IS_ABSENT] = None
    layer_scale: Annotated[float | None, NULL_IS_ABSENT] = None
    placement: Annotated[Placement | None, NULL_IS_ABSENT] = None
    qk_norm: Annotated[bool | None, NULL_IS_ABSENT] = None
    v_norm: Annotated[bool | None, NULL_IS_ABSENT] = None


class NormKeys(SlotKeys, TargetKeys):
    at: Annotated[NormsOfSites | None, NULL_IS_ABSENT] = None
    view: str | None = None
    layout: str | None = None
    running_from: Annotated[RunningFrom, Key(implied="step")] = "step"
    half_life: Annotated[Positive | None, Key(SAMPLES, implied=None)] = None
    # An id counts these two in norm_batch_size.
    mixes_samples: Annotated[bool | None, NOT_IN_ID] = None
    synchronized: Annotated[bool | None, NOT_IN_ID] = None
    track_running_stats: Annotated[bool | None, FOR_TARGET] = None

    @property
    def may_mix_samples(self) -> bool:
        """False if declared not to mix samples, so that nothing splits its statistics.

        Running averages pool samples, whatever an output reads.
        """
        return self.mixes_samples is not False or self.track_running_stats is True


class ModelKeys(TargetKeys):
    weights: Text | None = None
    replace: Annotated[Texts | None, NULL_IS_ABSENT] = None


class DataKeys(TargetKeys):
    limit_train: Annotated[Count | None, Key("samples, for texts blocks", implied=None)] = None
    crop: Annotated[Count | None, Key("pixels", implied=None)] = None
    order: Annotated[Literal["shuffled", "sorted"] | None, Key(implied="shuffled")] = None
    data_dir: Annotated[Text | None, Key(in_id=False, goes_to_target=True)] = None
    path: Annotated[Text | None, FOR_TARGET] = None
    root: Annotated[Text | None, FOR_TARGET] = None


class OptimKeys(TargetKeys):
    default_lr: Annotated[float | None, NOT_IN_ID] = None
    momentum: Annotated[Fraction | None, FOR_TARGET] = None
    nesterov: Annotated[bool | None, FOR_TARGET] = None
    fused: Annotated[bool | None, FOR_TARGET] = None
    weight_decay: NotNegative
    decay_norm: bool | NotNegative
    decay_bias: Annotated[bool | None, Key(implied=True)] = True


class TrainerKeys(Group):
    accelerator: Annotated[Literal["auto", "cpu", "gpu", "cuda"], NOT_IN_ID]
    # Counted in norm_batch_size: a device's share of a forward pass is a ghost sub-batch.
    devices: Annotated[Count, NOT_IN_ID]
    num_nodes: Annotated[Count, NOT_IN_ID]
    strategy: Annotated[Literal["auto", "ddp"], NOT_IN_ID]
    precision: Literal["32-true", "bf16-mixed", "64-true"]

    @property
    def num_processes(self) -> int:
        """One for each device, over all nodes."""
        return self.devices * self.num_nodes


class TuneKeys(Group):
    points: Annotated[Count, NOT_IN_ID]
    seeds: Annotated[Several, NOT_IN_ID]
    first_seed: Annotated[Index, NOT_IN_ID]
    metric: Annotated[Text | None, NOT_IN_ID]


class Settings(SlotKeys):
    """The typed values of a cell, in the order of conf/config.yaml."""

    batch_size: Annotated[Count, Key(SAMPLES)]
    micro_batch_size: Annotated[Count | None, Key(SAMPLES)]
    norm_batch_size: Annotated[Count | None, Key(SAMPLES)]
    epochs: Annotated[Count, NOT_PROBED]
    steps: Annotated[Count | None, Key(STEPS, is_probed=False)]
    samples: Annotated[Count | None, Key(SAMPLES, is_probed=False)]
    lr: Annotated[Positive, NOT_PROBED]
    lr_rule: Annotated[Literal["none", "linear", "sqrt", "momentum_aware"], NOT_PROBED]
    base_batch_size: Annotated[Count, Key(SAMPLES, is_probed=False)]
    max_grad_norm: Annotated[Positive | None, NOT_PROBED]
    class_weights: Annotated[Weights | None, NOT_PROBED]
    seed: Annotated[Index, NOT_IN_ID]
    replicas: Annotated[Replicas, NOT_IN_ID]
    study: Annotated[Name, NOT_IN_ID]
    tags: Annotated[Texts | None, NOT_IN_ID]
    notes: Annotated[Text | None, NOT_IN_ID]
    dry_run: Annotated[bool, NOT_IN_ID]
    workers: Annotated[Index | None, NOT_IN_ID]
    fail_fast: Annotated[bool, NOT_IN_ID]
    runs_dir: Annotated[Text, NOT_IN_ID]
    data_dir: Annotated[Text, NOT_IN_ID]
    eps: Eps
    matmul_precision: Literal["highest", "high", "medium"]
    drop_last: bool
    val_every_epochs: Annotated[Count, Key("epochs", in_id=False, is_probed=False)]
    log_every: Annotated[Count, Key(STEPS, in_id=False)]
    chunk: Annotated[Count, Key(STEPS, in_id=False)]
    stack: Annotated[Literal["auto", True, False], NOT_IN_ID]
    compile: Annotated[bool, NOT_IN_ID]
    save_weights: Annotated[bool, NOT_IN_ID]
    evaluate_with: Annotated[Statistics, NOT_IN_ID]
    precise_samples: Annotated[Several, Key(SAMPLES, in_id=False)]
    evaluate_batch_sizes: Annotated[Counts | None, Key(SAMPLES, in_id=False)]
    evaluate_at: Annotated[Views | None, NOT_IN_ID]
    evaluate_every_epoch: Annotated[bool, NOT_IN_ID]
    allow_leak: Annotated[bool, NOT_IN_ID]
    norm: NormKeys
    model: ModelKeys
    data: DataKeys
    optim: Annotated[OptimKeys, NOT_PROBED]
    schedule: Annotated[TargetKeys, NOT_PROBED]
    callback: Annotated[dict[str, Any] | None, NOT_PROBED] = None
    trainer: TrainerKeys
    logger: Annotated[dict[str, Any], NOT_IN_ID]
    tune: Annotated[TuneKeys, NOT_IN_ID]
    experiment: Annotated[Text | None, NOT_IN_ID]

    @property
    def sizes(self) -> Sizes:
        """The three sizes as typed."""
        return Sizes(self.batch_size, self.micro_batch_size, self.norm_batch_size)


def _table(group: type[Group], prefix: str = "") -> Iterator[tuple[str, Key]]:
    kinds = get_type_hints(group, include_extras=True)
    for name, field in group.model_fields.items():
        meaning = next((part for part in field.metadata if isinstance(part, Key)), Key())
        key = f"{prefix}{field.alias or name}"
        yield key, replace(meaning, kind=kinds[name])
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            yield from _table(field.annotation, f"{key}.")


KEYS = dict(_table(Settings))  # by dotted name, as norm.half_life


def separate(group: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a group that are for normexp alone, and those that its target gets."""
    own, for_target = {}, {}
    for name, value in values.items():
        meaning = KEYS.get(f"{group}.{name}", FOR_TARGET)
        (for_target if meaning.goes_to_target else own)[name] = value
    return own, for_target


def is_read(key: str) -> bool:
    """True if something reads a dotted key: normexp, or the target of its group."""
    return key in KEYS or key.partition(".")[0] in OPEN


def in_identity(key: str) -> bool:
    """True if a dotted key, of normexp or of a user's module, is part of the identity."""
    group, _, name = key.partition(".")
    meaning = KEYS.get(key) or KEYS.get(group)
    return meaning is not None and meaning.in_id and name != "_partial_"


def is_probed(key: str) -> bool:
    """True if what a network mixes and leaks may depend on a key of its identity."""
    return key not in KEYS or KEYS[key].is_probed


# --- Dotted keys in nested mappings --------------------------------------------------------------


def value_at(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def with_values(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested dicts with other values at dotted keys."""
    changed = dict(tree)
    for key, value in changes.items():
        name, dot, rest = key.partition(".")
        changed[name] = with_values(changed[name], {rest: value}) if dot else value
    return changed


def dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Every key of nested mappings, as `optim` and `optim.momentum`."""
    for name in tree if isinstance(tree, Mapping) else ():
        yield f"{prefix}{name}"
        yield from dotted_keys(tree[name], f"{prefix}{name}.")
