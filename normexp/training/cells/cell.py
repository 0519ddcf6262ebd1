"""Prepares a cell: builds its parts, probes its network, refuses mistakes. Writes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.build import build_norm, norm_target
from normexp.norms.site import named_sites
from normexp.training.batching.replicas import LARGE_GROUP, SMALL_FORWARD, suitable_threads
from normexp.training.cells.describe import defines_of, derived_of, measured_of, notes_of
from normexp.training.checks.preflight import Traits, examine
from normexp.training.checks.training import (
    check_default_dtype,
    check_evaluation,
    check_norm_batch_size,
    check_optimizer_step,
    check_outputs,
    check_slots,
    why_alone,
)
from normexp.training.config.keys import is_probed
from normexp.training.config.spec import CellSpec
from normexp.training.data.build import load_data
from normexp.training.data.dataset import Data
from normexp.training.devices import check_devices, device_type
from normexp.training.models.build import NetworkBuilder, build_network
from normexp.training.recipe import Recipe, recipe_of
from normexp.training.records.logs import collected_messages
from normexp.training.records.result import Measured, check_joins
from normexp.training.records.source import refuse_edited

logger = logging.getLogger(__name__)

# The traits that cells have in common.
_probes: dict[str, Traits] = {}


@dataclass(frozen=True, eq=False)
class Cell:
    """Everything about a training except its seed, built and checked.

    Attributes:
        defines, derived, measured: of its results.
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
    alone: str | None
    defines: dict[str, Any]
    derived: dict[str, Any]
    measured: Measured
    messages: Sequence[str]

    @property
    def title(self) -> str:
        return f"{self.spec.choices['norm']} on {self.spec.choices['data']}"

    @property
    def elements_per_forward(self) -> int:
        """The number of values entering all sites of one replica in one forward pass."""
        return self.recipe.sizes.micro * self.traits.elements_per_sample

    @property
    def invalid(self) -> str | None:
        """Why the numbers of this cell must not be compared; None if they may."""
        return self.measured.invalid


@suitable_threads()
def prepare_cell(spec: CellSpec) -> Cell:
    """Builds and probes a cell, and refuses every mistake that can be found before training.

    Raises:
        UserError: a value that cannot be trained, with the key and the remedy.
    """
    if spec.error:
        raise UserError(spec.error)
    with collected_messages() as messages:
        check_devices(spec.settings.trainer)
        check_default_dtype()
        data = load_data(spec.config["data"])
        recipe = recipe_of(spec, data)
        build = make_builder(spec, recipe, data)
        network = build(spec.seeds[0])
        refuse_edited(spec.sources)
        check_slots(spec.config, build, spec.choices["model"])
        check_outputs(network, data, build.target.path)
        traits = _probe(spec, network, data, recipe)
        if traits.norms_mix_samples and not spec.settings.norm.may_mix_samples:
            where = traits.mixing
            raise UserError(f"norm.mixes_samples=false: samples are mixed at {where}; drop the key")
        recipe = replace(
            recipe,
            mixes_samples=traits.mixes_samples,
            mixes_in_evaluation=traits.mixes_samples_in_evaluation,
            channels_last=channels_last_pays(network, data, recipe, traits),
        )
        if traits.mixes_samples:
            check_norm_batch_size(recipe)
        alone = why_alone(recipe, check_optimizer_step(recipe, network))
        check_evaluation(recipe, data, traits)
        for note in notes_of(spec, recipe, traits, alone):
            logger.info(note)
        defines = defines_of(spec, data, build.weights)
        check_joins(spec.directory, defines)
        return Cell(
            spec=spec,
            recipe=recipe,
            data=data,
            build=build if traits.mixes_samples else build.unsplit(),
            traits=traits,
            alone=alone,
            defines=defines,
            derived=derived_of(spec, recipe),
            measured=measured_of(network, data, traits),
            messages=messages,
        )


def channels_last_pays(network: nn.Module, data: Data, recipe: Recipe, traits: Traits) -> bool:
    """True if on a CPU a network gains by having its channels last in memory.

    Convolutions and batch norm gain. Instance norm loses more than the convolutions gain, group and
    layer norm about as much. A network small enough to be stacked keeps the default layout, because
    stacks need it.
    """
    settings, per_sample = recipe.settings, traits.elements_per_sample
    is_measured = settings.trainer.precision == "32-true" and not settings.compile
    on_cpu = device_type(settings.trainer.accelerator) == "cpu"
    is_image = len(data.input_shape) == 3
    can_stack = settings.stack is True or recipe.sizes.micro * per_sample <= SMALL_FORWARD
    if not (is_measured and on_cpu and is_image) or can_stack:
        return False
    sites = [site for _, site in named_sites(network)]
    batch_norms = (BatchNorm, nn.BatchNorm2d)
    are_batch_norms = all(s.view == "map" and isinstance(s.norm, batch_norms) for s in sites)
    return are_batch_norms and recipe.sizes.norm * per_sample >= LARGE_GROUP * len(sites)


def make_builder(spec: CellSpec, recipe: Recipe, data: Data) -> NetworkBuilder:
    """The builder of a cell's networks."""
    norm = build_norm(
        spec.config,
        recipe.sizes.norm_batch_size,
        num_steps=recipe.num_steps,
        num_positions=data.input_shape[-1],
        momentum=recipe.norm_momentum,
    )
    return build_network(spec.config["model"], norm, data)


def _probe(spec: CellSpec, network: nn.Module, data: Data, recipe: Recipe) -> Traits:
    """What the network mixes and leaks, measured once for all cells that share what is probed.

    Raises UserError if it must not be trained.
    """
    content = {key: value for key, value in spec.identity.items() if is_probed(key)}
    norm, _ = norm_target(spec.config["norm"], momentum=recipe.norm_momentum)
    steps = recipe.num_steps if "num_training_steps" in norm.arguments else None
    drop_last, allow_leak = recipe.settings.drop_last, recipe.settings.allow_leak
    key = json.dumps([content, steps, allow_leak, data.digest], sort_keys=True, default=str)
    if key not in _probes:
        _probes[key] = examine(
            network, data, recipe.sizes, drop_last=drop_last, allow_leak=allow_leak
        )
    return _probes[key]
