"""The identity of a training, its id, and the config in its record."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from normexp.batching.sizes import Sizes
from normexp.build import NetworkBuilder
from normexp.cells.recipe import OPTIM_SCHEDULE
from normexp.checks.preflight import Traits
from normexp.config.compose import (
    parts_with_target,
    shipped_config,
    shipped_defaults,
    shipped_targets,
)
from normexp.config.rules import OPTIONAL_GROUPS, in_identity, sees_validations
from normexp.config.spec import CellSpec
from normexp.config.target import plain
from normexp.data.dataset import Data
from normexp.norms.slots import SLOTS, changed
from normexp.records.identity import (
    canonical_sizes,
    cell_id,
    differences,
    digest_of_source,
    loaded_sources,
    source_root,
)
from normexp.training.recipe import Recipe

logger = logging.getLogger(__name__)

GROUPS = ("norm", "model", "data", "optim")
SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")
RECORDED_TRAITS = (
    *("mixes_samples", "mixes_samples_in_evaluation", "leaks_future", "leaks_future_in_training"),
)

# Versions of choices, raised when a default or the meaning of a choice changes: {"norm/group": 2}.
# "config" stands for the top-level keys of conf/config.yaml. Versions are hashed, so that trainings
# before and after the change are different cells.
VERSIONS: dict[str, int] = {
    "model/torchvision": 2,  # sites keep the eps and momentum of the norms that they replace
    # 2: warm-ups and ramps are shares of the training; they were steps
    **dict.fromkeys(("norm/batch_renorm", "norm/moving_average_batch", "norm/power"), 2),
}

# Keys that the identity holds only in derived form, from the `Recipe` and the slots.
DERIVED_KEYS = {
    *("epochs", "steps", "samples", "lr_rule", "base_batch_size", "optim.default_lr"),
    *("norm.half_life", *SLOTS, *(f"norm.{slot}" for slot in SLOTS)),
    *("norm._partial_", "model._partial_", "optim._partial_", "schedule._partial_"),
}

# Values that mean the same as a missing key: the identity leaves them out.
IMPLIED_VALUES = {"optim.decay_bias": True, "data.limit_train": None}


def identity_of(
    spec: CellSpec, recipe: Recipe, build: NetworkBuilder, data: Data, *, mixes_samples: bool
) -> dict[str, Any]:
    """Everything that defines a training except its seed, as derived values in canonical form.

    Holds digests of the data and of the user's own modules, so that an edit makes a new cell.
    """
    cfg, weights_digest = spec.composed, build.weights_digest
    identity = defining_values(plain(cfg))
    for part in parts_with_target(identity):
        with suppress(TypeError):  # a builtin has no file
            file = inspect.getsourcefile(get_object(part["_target_"]))
            root = None if file is None else source_root(Path(file))
            if root is not None:
                now = digest_of_source(root)
                part["source_digest"] = loaded_sources().get(str(root), now)
                if part["source_digest"] != now:
                    logger.warning(
                        "%s was edited after its import: the imported version is trained", root
                    )
    identity["data"]["digest"] = data.digest
    if weights_digest is not None:
        identity["model"]["weights_digest"] = weights_digest
    identity |= {**_slots(build), "num_steps": recipe.num_steps, "lr": recipe.lr}
    # A device's share of a forward pass is a ghost sub-batch, so the recipe's sizes count devices.
    sizes = [getattr(recipe.sizes, key) for key in SIZES]
    identity |= canonical_sizes(*sizes, mixes_samples=mixes_samples)
    if sees_validations(cfg) and ("callback" in identity or recipe.schedule.monitor is not None):
        identity["val_every_epochs"] = cfg.val_every_epochs
    if "schedule" in identity:
        for name in OPTIM_SCHEDULE:
            del identity["optim"][name]
    if recipe.optimizer_momentum is not None:
        identity["optim"]["momentum"] = recipe.optimizer_momentum
    if recipe.norm_momentum is not None:
        identity["norm"]["momentum"] = recipe.norm_momentum
    return identity


def _slots(build: NetworkBuilder) -> dict[str, Any]:
    assert build.norm is not None
    return changed(build.norm.slots, build.norm.used)


def id_of(identity: Mapping[str, Any], choices: Mapping[str, str]) -> str:
    """The id of a cell: a slug, and a hash of everything that differs from the shipped defaults."""
    defaults = defining_values(shipped_config() | {"trainer": shipped_defaults("trainer", "auto")})
    groups = [*GROUPS, *(group for group in OPTIONAL_GROUPS if group in identity)]
    rest = {key: value for key, value in identity.items() if key not in groups}
    content = differences(defaults | rest, defaults)  # always has lr, whose default is a reference
    if version := VERSIONS.get("config"):
        content["version"] = version
    for group in groups:
        content[group] = content_of(group, choices[group], identity[group])
    names = [_label(group, choices[group], identity[group]) for group in GROUPS[:3]]
    sizes = [f"{key[0]}{identity[key]}" for key in SIZES if identity[key]]  # b32, m8, n4
    return cell_id(content, [*names, *sizes, f"lr{identity['lr']:.6g}"])


def record_of(
    spec: CellSpec,
    recipe: Recipe,
    build: NetworkBuilder,
    data: Data,
    traits: Traits,
    identity: dict[str, Any],
) -> dict[str, Any]:
    """The config in result.json: names, canonical sizes, traits, and `recipe`: what was trained.

    Does not depend on which of several equivalent command lines trained the cell.
    """
    cfg, sizes = spec.composed, {key: identity[key] for key in SIZES}
    chance = data.chance_accuracy
    return {
        **choices_in(spec.choices),
        **{key: cfg[key] for key in ("lr_rule", "eps", "drop_last")},
        **sizes,
        "devices": recipe.devices.count,
        "split": Sizes(**sizes).label,
        "epochs": recipe.num_epochs,
        "num_steps": recipe.num_steps,
        "lr": recipe.lr,
        "max_grad_norm": recipe.max_grad_norm,
        "precision": recipe.devices.precision,
        "matmul_precision": recipe.devices.matmul_precision,
        "recipe": identity,
        **_slots(build),
        **{name: getattr(traits, name) for name in RECORDED_TRAITS},
        **({} if chance is None else {"chance_accuracy": chance}),
    }


def choices_in(record: Mapping[str, Any]) -> dict[str, str]:
    """The choice in each config group of a cell, as `compose_cell` returned them."""
    return {group: record[group] for group in (*GROUPS, *OPTIONAL_GROUPS) if group in record}


def defining_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config that define the training, without those of `DERIVED_KEYS`."""

    def counts(key: str) -> bool:
        return in_identity(key) and key not in DERIVED_KEYS

    found = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            value = {
                name: each
                for name, each in value.items()
                if counts(path := f"{key}.{name}") and (path, each) not in IMPLIED_VALUES.items()
            }
        if counts(key):
            found[key] = value
    return found


def content_of(group: str, choice: str, values: dict[str, Any]) -> dict[str, Any]:
    """The hashed content of a group: a shipped choice by name, a user's own in full."""
    defaults = shipped_defaults(group, choice)
    if "_target_" not in values:  # several callbacks, by name
        return values
    if defaults is None:
        target: str = values["_target_"]
        name = shipped_targets(group).get(target, target)
        content = values | {"_target_": name}
    else:
        name = f"{group}/{choice}"
        content = {
            "choice": choice,
            **differences(values, defining_values({group: defaults})[group]),
        }
    if version := VERSIONS.get(name):
        content["version"] = version
    return content


def _label(group: str, choice: str, values: Mapping[str, Any]) -> str:
    """A part's name in ids: its knob `name`, as torchvision's resnet50, or its choice.

    A user's own part has the name of its class, whichever YAML names it, so that it has one id.
    """
    if isinstance(values.get("name"), str):
        return values["name"]
    if shipped_defaults(group, choice) is None:
        return str(values["_target_"]).rpartition(".")[2].removeprefix("load_")
    return choice.rpartition("/")[2]
