"""What result.json says about the cell of a run, and what of it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normexp.batching.sizes import SIZES
from normexp.build import NetworkBuilder
from normexp.cells.recipe import OPTIM_SCHEDULE
from normexp.checks.preflight import Traits
from normexp.config.cells import CellSpec
from normexp.config.compose import parts_with_target
from normexp.config.identity import canonical_sizes
from normexp.config.schema import OPTIONAL_GROUPS, PARTS
from normexp.data.dataset import Data
from normexp.data.prediction import describe_data
from normexp.norms.slots import SLOTS, changed
from normexp.records.sources import source_digest
from normexp.training.recipe import Recipe

RECORDED_TRAITS = (
    *("mixes_samples", "mixes_samples_in_evaluation", "leaks_future", "leaks_future_in_training"),
)
# Keys that a recorded recipe has in derived form only: as numbers of steps, rates and slots.
DERIVED_KEYS = ("epochs", "steps", "samples", "lr_rule", "base_batch_size", *SLOTS)
DERIVED_KEYS_OF_NORM = ("half_life", *SLOTS)


def describe_cell(
    spec: CellSpec, recipe: Recipe, build: NetworkBuilder, data: Data, traits: Traits
) -> dict[str, Any]:
    """The config in result.json: names, canonical sizes, traits, and `recipe`: what was trained.

    Does not depend on which of several equivalent command lines trained the cell.
    """
    chance, slots = data.chance_accuracy, {slot: spec.norm.values.get(slot) for slot in SLOTS}
    trained = _describe_training(spec, recipe, build, data, mixes_samples=traits.mixes_samples)
    sizes = {key: trained[key] for key in SIZES}
    return {
        **choices_in(spec.choices),
        **{key: spec.defining[key] for key in ("lr_rule", "eps", "drop_last")},
        **sizes,
        "devices": recipe.devices.count,
        "epochs": recipe.num_epochs,
        "num_steps": recipe.num_steps,
        "lr": recipe.lr,
        "max_grad_norm": recipe.max_grad_norm,
        "precision": recipe.devices.precision,
        "matmul_precision": recipe.devices.matmul_precision,
        "recipe": trained,
        "data_set": describe_data(data),
        "norm_slots": {slot: value for slot, value in slots.items() if value is not None},
        **_slots(build),
        **{name: getattr(traits, name) for name in RECORDED_TRAITS},
        **({} if chance is None else {"chance_accuracy": chance}),
    }


def choices_in(description: Mapping[str, Any]) -> dict[str, str]:
    """The choice in each config group of a cell, as `compose_cell` returned them."""
    return {
        group: description[group] for group in (*PARTS, *OPTIONAL_GROUPS) if group in description
    }


def _describe_training(
    spec: CellSpec, recipe: Recipe, build: NetworkBuilder, data: Data, *, mixes_samples: bool
) -> dict[str, Any]:
    """Everything that defined the training except its seed, in canonical form.

    Has digests of the data, of weights and of the user's own modules.
    """
    values = {key: value for key, value in spec.defining.items() if key not in DERIVED_KEYS}
    norm = {k: value for k, value in values["norm"].items() if k not in DERIVED_KEYS_OF_NORM}
    optim, model, content = dict(values["optim"]), dict(values["model"]), dict(values["data"])
    content["digest"] = data.digest
    if build.weights_digest is not None:
        model["weights_digest"] = build.weights_digest
    if recipe.optimizer_momentum is not None:
        optim["momentum"] = recipe.optimizer_momentum
    if recipe.norm_momentum is not None:
        norm["momentum"] = recipe.norm_momentum
    if "schedule" in values:
        optim = {key: value for key, value in optim.items() if key not in OPTIM_SCHEDULE}
    # A device's share of a forward pass is a ghost sub-batch, so the recipe's sizes count devices.
    sizes = [getattr(recipe.sizes, key) for key in SIZES]
    values |= canonical_sizes(*sizes, mixes_samples=mixes_samples)
    values |= {"norm": norm, "optim": optim, "model": model, "data": content, **_slots(build)}
    values |= {"num_steps": recipe.num_steps, "lr": recipe.lr}
    acts_on_validations = "callback" in values or recipe.schedule.monitor is not None
    if "val_every_epochs" in spec.identity and acts_on_validations:
        values["val_every_epochs"] = recipe.val_every_epochs
    for part in parts_with_target(values):
        if digest := source_digest(part["_target_"]):
            part["source_digest"] = digest
    return values


def _slots(build: NetworkBuilder) -> dict[str, Any]:
    """The slots that the model uses and that differ from their defaults."""
    assert build.norm is not None
    return changed(build.norm.slots, build.norm.used)
