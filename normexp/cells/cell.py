"""Prepares a cell: builds its parts, probes its network and refuses mistakes. Writes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from normexp.batching.speed import suitable_threads
from normexp.build import NetworkBuilder, build_network, build_norm, load_data, norm_target
from normexp.cells.description import describe_cell
from normexp.cells.recipe import deviations, devices_of, recipe_of
from normexp.cells.refusals import (
    check_evaluation,
    check_norm_batch_size,
    check_optimizer_step,
    check_outputs,
    check_slots,
    why_alone,
)
from normexp.checks.preflight import Traits, examine
from normexp.config.cells import CellSpec
from normexp.config.identity import may_mix_samples
from normexp.config.schema import validate
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.records.logs import collected_messages
from normexp.records.result import check_joins
from normexp.records.sources import refuse_edited
from normexp.training.devices import check_devices
from normexp.training.evaluation import criterion_of
from normexp.training.recipe import Recipe

logger = logging.getLogger(__name__)

# Keys of an identity that no probe of the network depends on.
NOT_PROBED = {
    *("lr", "lr_rule", "base_batch_size", "optim", "schedule", "callback", "max_grad_norm"),
    *("epochs", "steps", "samples", "val_every_epochs"),
}

# What cells have in common: their traits, and what was logged.
_probes: dict[str, tuple[Traits, list[str]]] = {}


@dataclass(frozen=True, eq=False)
class Cell:
    """Everything about a training except its seed, built and checked.

    Attributes:
        description: the `config` of its results, see `describe_cell`.
        build: builds the network of a seed.
        traits: what its network was measured to mix and to leak.
        alone: why each seed trains by itself; None if seeds may share a stack.
        messages: what was logged while the cell was prepared.
    """

    spec: CellSpec
    recipe: Recipe
    data: Data
    build: NetworkBuilder
    traits: Traits
    num_parameters: int
    alone: str | None
    description: dict[str, Any]
    messages: Sequence[str]

    @property
    def title(self) -> str:
        return f"{self.description['norm']} on {self.description['data']}"

    @property
    def directory(self) -> Path:
        return self.spec.directory

    @property
    def elements_per_forward(self) -> int:
        """The number of values entering all sites of one replica in one forward pass."""
        return self.recipe.sizes.micro * self.traits.elements_per_sample

    @property
    def invalid(self) -> str | None:
        """Why the numbers of this cell must not be compared; None if they may."""
        leak = self.traits.leak
        return None if leak is None else f"leaks the future at {leak}"


@suitable_threads(0)  # probes are too small for a second thread to pay
def prepare_cell(spec: CellSpec) -> Cell:
    """Builds and probes a cell, and refuses every mistake that can be found before training.

    Raises:
        UserError: a value that cannot be trained, with the key and the remedy.
    """
    if spec.config is None:
        raise UserError(spec.error)
    with collected_messages() as messages:
        validate(spec.config)
        check_devices(devices_of(spec))
        data = load_data(spec)
        recipe = make_recipe(spec, data)
        build = make_builder(spec, recipe, data)
        network = build(spec.seeds[0])
        refuse_edited(spec.sources)
        check_slots(spec, build)
        check_outputs(network, data, build.target.path)
        traits = _probe(spec, network, data, recipe)
        if traits.norms_mix_samples and not may_mix_samples(spec.values):
            where = traits.mixing
            raise UserError(f"norm.mixes_samples=false: samples are mixed at {where}; drop the key")
        if traits.mixes_samples:
            check_norm_batch_size(spec.sizes["norm_batch_size"], recipe)
        alone = why_alone(recipe, check_optimizer_step(recipe, network))
        check_evaluation(recipe, data, traits)
        notes = _findings(spec, recipe, traits, alone)
        for note in [*deviations(spec, recipe, len(data.train)), *notes]:
            logger.info(note)
        description = describe_cell(spec, recipe, build, data, traits)
        check_joins(spec.directory, description)
        return Cell(
            spec=spec,
            recipe=recipe.for_norm(
                mixes_samples=traits.mixes_samples,
                mixes_in_evaluation=traits.mixes_samples_in_evaluation,
            ),
            data=data,
            build=build if traits.mixes_samples else build.unsplit(),
            traits=traits,
            num_parameters=sum(p.numel() for p in network.parameters()),
            alone=alone,
            description=description,
            messages=messages,
        )


def make_recipe(spec: CellSpec, data: Data) -> Recipe:
    """The recipe of a cell on its data, see `recipe_of`."""
    metrics = [f"val/{name}" for name in criterion_of(data).metrics]
    return recipe_of(spec, num_train=len(data.train), metrics=metrics)


def make_builder(spec: CellSpec, recipe: Recipe, data: Data) -> NetworkBuilder:
    """The builder of a cell's networks."""
    num_steps, momentum = recipe.num_steps, recipe.norm_momentum
    norm = build_norm(spec.norm, recipe.sizes, data, num_steps=num_steps, momentum=momentum)
    return build_network(spec.values["model"], norm, data)


def _probe(spec: CellSpec, network: nn.Module, data: Data, recipe: Recipe) -> Traits:
    """What the network mixes and leaks, measured once for all cells that differ in `NOT_PROBED`.

    Raises UserError if it must not be trained.
    """
    content = {key: value for key, value in spec.identity.items() if key not in NOT_PROBED}
    norm, _ = norm_target(spec.norm)
    steps = recipe.num_steps if "num_training_steps" in norm.arguments else None
    key = json.dumps([content, steps, recipe.allow_leak, data.digest], sort_keys=True, default=str)
    if key in _probes:
        for message in _probes[key][1]:  # for the log of this cell's stack; a screen shows it once
            logger.info("%s", message)
        return _probes[key][0]
    kind = {"drop_last": recipe.drop_last, "allow_leak": recipe.allow_leak}
    with collected_messages() as messages:
        traits = examine(network, data, recipe.sizes, **kind)
    _probes[key] = traits, messages
    return traits


def _findings(spec: CellSpec, recipe: Recipe, traits: Traits, alone: str | None) -> list[str]:
    """What was found about the network that changes how it is trained or evaluated."""
    norm, notes = spec.choices["norm"], list[str]()
    if "batch" in recipe.statistics and not traits.mixes_samples:
        notes.append(f"no batch statistics to evaluate with: norm={norm} does not mix samples")
    if alone is not None and len(spec.seeds) > 1:
        notes.append(f"each seed of norm={norm} trains by itself: {alone}")
    if traits.mixes_samples and recipe.sizes.norm == 1:
        notes.append(
            "norm_batch_size=1: in training each sample has statistics of its own (batch norm is "
            "then instance norm), in evaluation all share the running averages; "
            "evaluate_with=[running,batch] shows the difference"
        )
    if not traits.mixes_samples and spec.sizes["norm_batch_size"] is not None:
        notes.append(
            f"norm={norm} does not mix samples, so norm_batch_size has no effect; "
            "declare norm.mixes_samples=false, and it is trained once for all sizes"
        )
    return notes
