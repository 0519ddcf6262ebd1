"""The recipe of a training, and the config in its record."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from normexp.batching.sizes import Sizes
from normexp.build import NetworkBuilder
from normexp.cells.recipe import OPTIM_SCHEDULE
from normexp.checks.preflight import Traits
from normexp.config.compose import parts_with_target
from normexp.config.identity import GROUPS, SIZES
from normexp.config.rules import OPTIONAL_GROUPS, in_identity, sees_validations
from normexp.config.spec import CellSpec
from normexp.config.target import plain
from normexp.data.dataset import Data
from normexp.norms.slots import SLOTS, changed
from normexp.records.identity import canonical_sizes, digest_of_source, source_root
from normexp.training.recipe import Recipe

RECORDED_TRAITS = (
    *("mixes_samples", "mixes_samples_in_evaluation", "leaks_future", "leaks_future_in_training"),
)

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
                part["source_digest"] = digest_of_source(root)
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
