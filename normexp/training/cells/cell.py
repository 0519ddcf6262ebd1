"""Prepares cells: builds their parts, probes networks, refuses mistakes. Writes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    check_view,
    why_alone,
)
from normexp.training.config.keys import is_probed
from normexp.training.config.spec import CellSpec
from normexp.training.data.build import build_data
from normexp.training.data.dataset import Data
from normexp.training.devices import check_devices, device_type
from normexp.training.models.build import NetworkBuilder, build_network
from normexp.training.recipe import Recipe, recipe_of
from normexp.training.records.logs import collected_messages
from normexp.training.records.result import Measured, check_joins
from normexp.training.records.source import refuse_edited
from normexp.training.trackers import Trackers

logger = logging.getLogger(__name__)

MOST_DATA_SETS = 2  # kept in memory at once


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


class Prepared:
    """The cells that a process has prepared, and what they have in common.

    Attributes:
        cells: by id.
    """

    def __init__(self) -> None:
        self.cells: dict[str, Cell] = {}
        self._data: dict[str, Data] = {}  # by their values, the last used last
        self._traits: dict[str, Traits] = {}  # by what is probed

    def prepare(self, specs: Sequence[CellSpec]) -> None:
        """Prepares the cells that are not prepared yet, and forgets all others."""
        self.cells = {spec.id: self.cells[spec.id] for spec in specs if spec.id in self.cells}
        for spec in specs:
            if spec.id not in self.cells:
                self.cells[spec.id] = prepare_cell(spec, self)

    @cached_property
    def trackers(self) -> Trackers:
        """Those of their loggers."""
        return Trackers()

    def data(self, values: Mapping[str, Any]) -> Data:
        """The data set that the values of `data` name. Do not write to its tensors."""
        key = json.dumps(values, default=str)
        data = self._data.pop(key) if key in self._data else build_data(values)
        self._data[key] = data
        if len(self._data) > MOST_DATA_SETS:
            del self._data[next(iter(self._data))]
        return data

    def traits(self, spec: CellSpec, network: nn.Module, data: Data, recipe: Recipe) -> Traits:
        """What the network mixes and leaks, measured once for all cells alike in what is probed.

        Raises UserError if it must not be trained.
        """
        content = {key: value for key, value in spec.identity.items() if is_probed(key)}
        norm, _ = norm_target(spec.config["norm"], momentum=recipe.norm_momentum)
        steps = recipe.num_steps if "num_training_steps" in norm.arguments else None
        drop_last, allow_leak = recipe.settings.drop_last, recipe.settings.allow_leak
        alike = [content, steps, allow_leak, data.digest]
        key = json.dumps(alike, sort_keys=True, default=str)
        if key not in self._traits:
            self._traits[key] = examine(
                network, data, recipe.sizes, drop_last=drop_last, allow_leak=allow_leak
            )
        return self._traits[key]


@suitable_threads()
def prepare_cell(spec: CellSpec, prepared: Prepared | None = None) -> Cell:
    """Builds and probes a cell, and refuses every mistake that can be found before training.

    Args:
        prepared: what it may have in common with other cells.

    Raises:
        UserError: a value that cannot be trained, with the key and the remedy.
    """
    if spec.error:
        raise UserError(spec.error)
    prepared = prepared or Prepared()
    with collected_messages() as messages:
        check_devices(spec.settings.trainer)
        check_default_dtype()
        data = prepared.data(spec.config["data"])
        recipe = recipe_of(spec, data)
        build = make_builder(spec, recipe, data)
        network = build(spec.seeds[0])
        if spec.sources:
            refuse_edited(spec.sources)
        check_slots(spec.config, build, spec.choices["model"])
        check_outputs(network, data, build.target.path)
        for view in recipe.views:
            check_view(view, network, data)
        traits = prepared.traits(spec, network, data, recipe)
        if traits.norms_mix_samples and not spec.settings.norm.may_mix_samples:
            where = traits.mixing
            raise UserError(
                f"norm.mixes_samples=false, as typed or declared: samples are mixed at {where}; "
                "remove the declaration"
            )
        if traits.keeps_padding:
            build = replace(build, norm=build.norm.keeping_padding())
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
    if device_type(settings.trainer.accelerator) != "cpu" or len(data.input_shape) != 3:
        return False
    if settings.trainer.precision != "32-true" or settings.compile:  # not measured
        return False
    if settings.stack is True or recipe.sizes.micro * per_sample <= SMALL_FORWARD:
        return False
    sites = [site for _, site in named_sites(network)]
    batch_norms = (BatchNorm, nn.BatchNorm2d)
    if not all(site.view == "map" and isinstance(site.norm, batch_norms) for site in sites):
        return False
    return recipe.sizes.norm * per_sample >= LARGE_GROUP * len(sites)


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
