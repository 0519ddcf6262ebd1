"""What is said and recorded of a cell and its training."""

from __future__ import annotations

from typing import Any

from torch import nn

from normexp.any_network.weights import Weights
from normexp.training.checks.preflight import Traits
from normexp.training.config.identity import packages_of
from normexp.training.config.spec import CellSpec
from normexp.training.criterion import chance_of
from normexp.training.data.dataset import Data, describe_data
from normexp.training.recipe import Recipe
from normexp.training.records.result import Measured
from normexp.training.records.source import source_files

# Of a network, in the records of its runs.
RECORDED_TRAITS = (
    "mixes_samples",
    "mixes_samples_in_evaluation",
    "leaks_future",
    "leaks_future_in_training",
)


def notes_of(spec: CellSpec, recipe: Recipe, traits: Traits, alone: str | None) -> list[str]:
    """How a training differs from what was typed or may be expected, in sentences.

    Args:
        alone: why each seed trains by itself, if so.
    """
    settings, batch_size, norm = spec.settings, recipe.sizes.batch_size, spec.choices["norm"]
    notes = [*traits.notes]
    num_train = recipe.num_train
    num_dropped = num_train - recipe.steps_per_epoch * batch_size
    if num_dropped > 0:
        notes.append(f"drop_last=true drops {num_dropped} of {num_train} samples per epoch")
    if recipe.lr != settings.lr:
        notes.append(
            f"lr_rule={settings.lr_rule} changes lr={settings.lr:g} at base_batch_size="
            f"{settings.base_batch_size} to lr={recipe.lr:g} at batch_size={batch_size}"
        )
    if "batch" in settings.evaluate_with and not traits.mixes_samples:
        notes.append(f"no batch statistics to evaluate with: norm={norm} does not mix samples")
    if alone is not None and len(spec.seeds) > 1:
        notes.append(f"each seed of norm={norm} trains by itself: {alone}")
    if traits.mixes_samples_in_evaluation:
        notes.append(
            f"in evaluation too, an output depends on the other samples of its batch, at "
            f"{traits.mixing_in_evaluation}: metrics are of shuffled batches of "
            f"{recipe.sizes.norm}, and single samples may score otherwise"
        )
    if traits.mixes_samples and recipe.sizes.norm == 1:
        notes.append(
            "norm_batch_size=1: in training each sample has statistics of its own (batch norm is "
            "then instance norm), in evaluation all share the running averages; "
            "evaluate_with=[running,batch] shows the difference"
        )
    typed = spec.typed.get("norm_batch_size", "norm_batch_size=null")
    if typed != "norm_batch_size=null" and not traits.mixes_samples:
        notes.append(f"norm={norm} does not mix samples, so norm_batch_size has no effect")
        if spec.settings.norm.may_mix_samples:
            is_own = source_files(spec.config["norm"]["_target_"])
            way = (
                "write `mixes_samples = False` in the class body itself"
                if is_own
                else "add norm.mixes_samples=false"
            )
            notes[-1] += f"; to train it once for all sizes, {way}"
    running_from = settings.norm.running_from
    if running_from != "step" and not traits.mixes_samples:
        notes.append(f"norm={norm} does not mix samples, so norm.running_from has no effect")
    elif running_from != "step" and "running_from" not in spec.identity["norm"]:
        notes.append("each step is a single group, so norm.running_from has no effect")
    if traits.mixes_samples and recipe.sizes.norm < settings.sizes.norm:
        num_processes = settings.trainer.num_processes
        notes.append(
            f"{num_processes} processes: norm={norm} takes its statistics over "
            f"{recipe.sizes.norm} samples each"
        )
    return notes


# --- What result.json says about the cell ---------------------------------------------------------


def defines_of(spec: CellSpec, data: Data, weights: Weights | None) -> dict[str, Any]:
    """What the id of a cell hashes, and digests of what was loaded."""
    digests = {"data": data.digest, **packages_of(spec.config, spec.choices)}
    if weights is not None:
        digests["weights"] = weights.digest
    return {**spec.identity, "digests": digests}


def derived_of(spec: CellSpec, recipe: Recipe) -> dict[str, Any]:
    """The values of a training that follow from its config and its data."""
    derived = {
        **recipe.sizes.effective(mixes_samples=recipe.mixes_samples),
        "steps": recipe.num_steps,
        "epochs": recipe.num_epochs,
        "lr": recipe.lr,
        "devices": recipe.settings.trainer.num_processes,
        **spec.names,
    }
    if spec.settings.lr_rule == "momentum_aware":
        derived["optim.momentum"] = recipe.optimizer_momentum
    if recipe.norm_momentum is not None:
        derived["norm.momentum"] = recipe.norm_momentum
    if recipe.channels_last:
        derived["channels_last"] = True
    return derived


def measured_of(network: nn.Module, data: Data, traits: Traits) -> Measured:
    """What is known of every run of a cell before it is trained."""
    leak = traits.leak
    return Measured(
        invalid=None if leak is None else f"leaks the future at {leak}",
        traits={name: getattr(traits, name) for name in RECORDED_TRAITS},
        chance_accuracy=data.chance_accuracy,
        chance=chance_of(data),
        num_parameters=sum(p.numel() for p in network.parameters()),
        data_set=describe_data(data),
    )
