"""Prepares a cell: builds its parts, probes its network, refuses mistakes. Writes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normexp.batching.copies import copied
from normexp.batching.replicas import model_arguments, suitable_threads
from normexp.cells.recipe import defines_of, derived_of, deviations, devices_of, recipe_of
from normexp.checks.network import name_some, probe_batch
from normexp.checks.preflight import Traits, check_optimizer, examine
from normexp.checks.probe import fixed_draws
from normexp.config.identity import may_mix_samples
from normexp.config.sizes import Sizes
from normexp.config.slots import PLACES, set_but_unused
from normexp.config.spec import CellSpec
from normexp.config.words import as_typed
from normexp.data.build import load_data
from normexp.data.dataset import Data, describe_data
from normexp.errors import UserError, first_line
from normexp.models.build import NetworkBuilder, build_network
from normexp.norms.build import build_norm, norm_target
from normexp.records.logs import collected_messages
from normexp.records.provenance import refuse_edited, source_line_of
from normexp.records.result import Measured, check_joins
from normexp.training.callbacks import describe_monitor
from normexp.training.devices import check_devices
from normexp.training.evaluation import criterion_of
from normexp.training.optimizer import can_train_a_stack, parameter_groups
from normexp.training.recipe import Recipe

logger = logging.getLogger(__name__)

# Keys of an identity that no probe of the network depends on.
NOT_PROBED = {
    *("lr", "lr_rule", "base_batch_size", "optim", "schedule", "callback", "max_grad_norm"),
    *("epochs", "steps", "samples", "val_every_epochs"),
}

# Of a network, in the records of its runs.
RECORDED_TRAITS = (
    *("mixes_samples", "mixes_samples_in_evaluation", "leaks_future", "leaks_future_in_training"),
)

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
        check_devices(devices_of(spec))
        data = load_data(spec.config["data"])
        recipe = make_recipe(spec, data)
        build = make_builder(spec, recipe, data)
        network = build(spec.seeds[0])
        refuse_edited(spec.sources)
        check_slots(spec, build)
        check_outputs(network, data, build.target.path)
        traits = _probe(spec, network, data, recipe)
        if traits.norms_mix_samples and not may_mix_samples(spec.config):
            where = traits.mixing
            raise UserError(f"norm.mixes_samples=false: samples are mixed at {where}; drop the key")
        if traits.mixes_samples:
            check_norm_batch_size(spec.sizes["norm_batch_size"], recipe)
        alone = why_alone(recipe, check_optimizer_step(recipe, network))
        check_evaluation(recipe, data, traits)
        findings = _findings(spec, recipe, traits, alone)
        for note in [*traits.notes, *deviations(spec, recipe, len(data.train)), *findings]:
            logger.info(note)
        defines = defines_of(spec, data, build.weights)
        check_joins(spec.directory, defines["digests"])
        return Cell(
            spec=spec,
            recipe=recipe.for_norm(
                mixes_samples=traits.mixes_samples,
                mixes_in_evaluation=traits.mixes_samples_in_evaluation,
            ),
            data=data,
            build=build if traits.mixes_samples else build.unsplit(),
            traits=traits,
            alone=alone,
            defines=defines,
            derived=derived_of(spec, recipe, mixes_samples=traits.mixes_samples),
            measured=_measured(network, data, traits),
            messages=messages,
        )


def _measured(network: nn.Module, data: Data, traits: Traits) -> Measured:
    """What is known of every run of a cell before it is trained."""
    leak = traits.leak
    return Measured(
        invalid=None if leak is None else f"leaks the future at {leak}",
        traits={name: getattr(traits, name) for name in RECORDED_TRAITS},
        chance_accuracy=data.chance_accuracy,
        num_parameters=sum(p.numel() for p in network.parameters()),
        data_set=describe_data(data),
    )


def make_recipe(spec: CellSpec, data: Data) -> Recipe:
    """The recipe of a cell on its data, see `recipe_of`."""
    metrics = [f"val/{name}" for name in criterion_of(data).metrics]
    return recipe_of(spec, num_train=len(data.train), metrics=metrics)


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
    """What the network mixes and leaks, measured once for all cells that differ in `NOT_PROBED`.

    Raises UserError if it must not be trained.
    """
    content = {key: value for key, value in spec.identity.items() if key not in NOT_PROBED}
    norm, _ = norm_target(spec.config["norm"])
    steps = recipe.num_steps if "num_training_steps" in norm.arguments else None
    key = json.dumps([content, steps, recipe.allow_leak, data.digest], sort_keys=True, default=str)
    if key not in _probes:
        kind = {"drop_last": recipe.drop_last, "allow_leak": recipe.allow_leak}
        _probes[key] = examine(network, data, recipe.sizes, **kind)
    return _probes[key]


def _findings(spec: CellSpec, recipe: Recipe, traits: Traits, alone: str | None) -> list[str]:
    """What was found about the network that changes how it is trained or evaluated."""
    norm, notes = spec.choices["norm"], list[str]()
    if "batch" in recipe.statistics and not traits.mixes_samples:
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
    typed = {word for word in spec.overrides if word.startswith("norm_batch_size=")}
    if typed - {"norm_batch_size=null"} and not traits.mixes_samples:
        notes.append(f"norm={norm} does not mix samples, so norm_batch_size has no effect")
        if may_mix_samples(spec.config):
            notes[-1] += "; declare norm.mixes_samples=false, and it is trained once for all sizes"
    if traits.mixes_samples and recipe.sizes.norm < Sizes(**spec.sizes).norm:
        notes.append(
            f"{recipe.devices.count} processes: norm={norm} takes its statistics over "
            f"{recipe.sizes.norm} samples each"
        )
    return notes


# --- The network ---------------------------------------------------------------------------------


def check_slots(spec: CellSpec, build: NetworkBuilder) -> None:
    """Refuses slots that the command sets and the model lacks."""
    assert build.norm is not None
    for key in set_but_unused(spec.config, build.norm.used):
        value, (lacks, fits) = as_typed(spec.config[key]), PLACES[key]
        raise UserError(f"{key}={value}: model={spec.choices['model']} has {lacks}; try {fits}")


def check_outputs(network: nn.Module, data: Data, target: str) -> None:
    """Refuses a model without parameters to train, or without a score of every class or token.

    Args:
        target: what `model._target_` names.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(
            f"model._target_={target} has no parameter to train; give it a layer with some"
        )
    batch = probe_batch(data, 2)
    try:
        with fixed_draws(), torch.no_grad():
            output = copied(network).eval()(*model_arguments(batch))
    except Exception:  # foreign code may raise anything; the probes that follow name the site
        return
    wanted = (*batch["targets"].shape, data.num_outputs)
    if isinstance(output, Tensor):
        shape = tuple(output.shape)
        remedy = "set the last size, or take it from an argument `num_outputs` or `num_classes`"
    else:
        shape, remedy = f"a {type(output).__name__}", "return the scores alone"
    if shape != wanted:
        raise UserError(
            f"model._target_={target} returns {shape} for inputs of shape "
            f"{tuple(batch['inputs'].shape)}; data={data.name} needs {wanted}: {remedy}"
        )


# --- The training --------------------------------------------------------------------------------


def check_optimizer_step(recipe: Recipe, network: nn.Module) -> Optimizer:
    """Takes a step with the training's optimizer, and checks that it holds every parameter."""
    network = copied(network)
    decay = {"weight_decay": recipe.weight_decay, "decay_norm": recipe.decay_norm}
    try:
        optimizer = recipe.optimizer(parameter_groups(network, **decay), lr=recipe.lr)
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise UserError(
                f"optim._target_={recipe.optimizer_target} returned a {kind}, not a "
                "torch.optim.Optimizer"
            )
        check_optimizer(network, optimizer)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return optimizer
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        line = source_line_of(error)
        name = recipe.optimizer_target
        raise UserError(f"optim._target_={name}: {first_line(error)}{line}") from error


def why_alone(recipe: Recipe, optimizer: Optimizer) -> str | None:
    """Why each seed must train by itself; None if seeds may share a stack."""
    watching, schedule = describe_monitor(recipe.callbacks()), recipe.schedule
    if schedule.monitor is not None:
        watching = f"{schedule.name} acts on {schedule.monitor}"
    if watching is not None:
        return f"{watching}, and seeds that train together would all follow their mean"
    if can_train_a_stack(optimizer):
        return None
    return f"{type(optimizer).__name__} may look at more than one value at a time"


def check_norm_batch_size(typed: int | None, recipe: Recipe) -> None:
    """Refuses a norm that mixes samples and would need statistics over several devices."""
    most, devices = recipe.sizes.norm, recipe.devices
    if typed is not None and typed > most:
        raise UserError(
            f"norm_batch_size={typed}: each of {devices.count} devices has {most} samples of each "
            f"forward; try norm_batch_size={most}, or norm=sync"
        )


def check_evaluation(recipe: Recipe, data: Data, traits: Traits) -> None:
    """Refuses a batch larger than a split, and statistics without meaning."""
    sizes = recipe.evaluation_batch_sizes
    if traits.leaks_future_in_training:
        takes_own_share = traits.mixes_samples and "own_share" in recipe.statistics
        for kind in [*(["batch"] if sizes else []), *(["own_share"] if takes_own_share else [])]:
            raise UserError(
                f"evaluate_with={kind}: these statistics of this norm include later positions of "
                "the text, so the loss is meaningless; try evaluate_with=[running,precise]"
            )
    if not sizes:
        return
    for split in ("val", "test"):
        num_samples = len(getattr(data, split))
        if max(sizes) > num_samples:
            raise UserError(
                f"evaluate_batch_sizes: {max(sizes)} is more than the {num_samples} samples "
                f"of {split}; try evaluate_batch_sizes=[{num_samples}] or less"
            )
    single = traits.single_valued(min(sizes)) if traits.mixes_samples else []
    if single:
        raise UserError(
            f"evaluate_batch_sizes={min(sizes)} leaves one value per statistic at "
            f"{name_some(single)}; try evaluate_batch_sizes=[{2 * min(sizes)}]"
        )
