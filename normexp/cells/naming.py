"""The recipe of a training, and the config in its record."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from normexp.batching.sizes import Sizes
from normexp.build import build_schedule
from normexp.cells.draft import OPTIM_SCHEDULE, CellDraft
from normexp.cells.plan import num_devices_of
from normexp.checks.preflight import Traits
from normexp.config.compose import parts_with_target
from normexp.config.identity import GROUPS, SIZES
from normexp.config.rules import OPTIONAL_GROUPS, in_identity, sees_validations
from normexp.config.target import plain
from normexp.norms.slots import SLOTS, changed
from normexp.records.identity import (
    canonical_sizes,
    digest_of_source,
    source_root,
)

RECORDED_TRAITS = (
    *("mixes_samples", "mixes_samples_in_evaluation", "leaks_future", "leaks_future_in_training"),
)

# Keys that the identity holds only in derived form, from `TrainingPlan` and the slots.
DERIVED_KEYS = {
    *("epochs", "steps", "samples", "lr_rule", "base_batch_size", "optim.default_lr"),
    *("norm.half_life", *SLOTS, *(f"norm.{slot}" for slot in SLOTS)),
    *("norm._partial_", "model._partial_", "optim._partial_", "schedule._partial_"),
}

# Values that mean the same as a missing key: the identity leaves them out.
IMPLIED_VALUES = {"optim.decay_bias": True, "data.limit_train": None}


def identity_of(draft: CellDraft, *, mixes_samples: bool) -> dict[str, Any]:
    """Everything that defines a training except its seed, as derived values in canonical form.

    Holds digests of the data and of the user's own modules, so that an edit makes a new cell.
    """
    cfg, plan, weights_digest = draft.cfg, draft.plan, draft.build.weights_digest
    identity = defining_values(plain(cfg))
    for part in parts_with_target(identity):
        with suppress(TypeError):  # a builtin has no file
            file = inspect.getsourcefile(get_object(part["_target_"]))
            root = None if file is None else source_root(Path(file))
            if root is not None:
                part["source_digest"] = digest_of_source(root)
    identity["data"]["digest"] = draft.data.digest
    if weights_digest is not None:
        identity["model"]["weights_digest"] = weights_digest
    identity |= {**_slots(draft), "num_steps": plan.num_steps, "lr": plan.lr}
    # A device's share of a forward pass is a ghost sub-batch, so the plan's sizes count devices.
    sizes = [getattr(plan.sizes, key) for key in SIZES]
    identity |= canonical_sizes(*sizes, mixes_samples=mixes_samples)
    if sees_validations(cfg) and (
        "callback" in identity or build_schedule(cfg, plan.num_steps).monitor is not None
    ):
        identity["val_every_epochs"] = cfg.val_every_epochs
    if "schedule" in identity:
        for name in OPTIM_SCHEDULE:
            del identity["optim"][name]
    if plan.optimizer_momentum is not None:
        identity["optim"]["momentum"] = plan.optimizer_momentum
    if plan.norm_momentum is not None:
        identity["norm"]["momentum"] = plan.norm_momentum
    return identity


def _slots(draft: CellDraft) -> dict[str, Any]:
    return changed(draft.norm.slots, draft.norm.used)


def record_of(draft: CellDraft, traits: Traits, identity: dict[str, Any]) -> dict[str, Any]:
    """The config in result.json: names, canonical sizes, traits, and `recipe`: what was trained.

    Does not depend on which of several equivalent command lines trained the cell.
    """
    cfg, plan = draft.cfg, draft.plan
    sizes, chance = {key: identity[key] for key in SIZES}, draft.data.chance_accuracy
    return {
        **choices_in(draft.choices),
        **{key: cfg[key] for key in ("lr_rule", "eps", "drop_last")},
        **sizes,
        "devices": num_devices_of(cfg),
        "split": Sizes(**sizes).label,
        "epochs": plan.num_steps / plan.steps_per_epoch,
        "num_steps": plan.num_steps,
        "lr": plan.lr,
        "max_grad_norm": cfg.max_grad_norm,
        "precision": cfg.trainer.precision,
        "matmul_precision": cfg.matmul_precision,
        "recipe": identity,
        **_slots(draft),
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
