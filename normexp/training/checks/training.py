"""Refuses what cannot be trained or evaluated of a network and a recipe that have been built."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normexp.errors import UserError, one_line
from normexp.training.batching.copies import copied
from normexp.training.batching.replicas import model_arguments
from normexp.training.callbacks import describe_monitor
from normexp.training.checks.network import probe_batch
from normexp.training.checks.preflight import Traits, single_valued
from normexp.training.checks.probe import fixed_draws
from normexp.training.config.slots import PLACES, set_but_unused
from normexp.training.data.dataset import Data
from normexp.training.data.views import View, refuse_empty_centre, refuse_side
from normexp.training.models.build import NetworkBuilder
from normexp.training.optimizer import can_train_a_stack
from normexp.training.recipe import Recipe
from normexp.training.statistics import STATISTICS
from normexp.words import as_typed, name_some

logger = logging.getLogger(__name__)


def check_default_dtype() -> None:
    """Raises UserError if networks would be built in another precision than that of their data."""
    dtype = torch.get_default_dtype()
    if dtype is not torch.float32:
        raise UserError(
            f"torch's default dtype is {dtype}, set before this training: networks would be built "
            "in it, and data are float32; call torch.set_default_dtype(torch.float32) first"
        )


def check_slots(config: Mapping[str, Any], build: NetworkBuilder, model: str) -> None:
    """Refuses slots that the config sets and the model, named for the message, lacks.

    Logs those that only the YAML of the norm sets.
    """
    used = build.norm.used
    for key in set_but_unused(config, used):
        lacks, fits = PLACES[key]
        raise UserError(f"{key}={as_typed(config[key])}: model={model} has {lacks}; try {fits}")
    if not build.takes_norm:  # where norms are replaced, that says it
        return
    for key in set_but_unused(config["norm"], used):
        lacks, _ = PLACES[key]
        slot = f"{key}={as_typed(config['norm'][key])}"
        logger.info("%s of the norm has no effect: model=%s has %s", slot, model, lacks)


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
    remedy = "set the last size, or take it from an argument `num_outputs` or `num_classes`"
    wanted = (*batch["targets"].shape, data.num_outputs)
    if data.task == "segmentation":  # the scores of a pixel lie along the second axis
        num_samples, *sides = batch["targets"].shape
        wanted = (num_samples, data.num_outputs, *sides)
        remedy = "try model=unet, or a network that gives every pixel a score of each class"
    for training in (False, True):
        try:
            with fixed_draws(), torch.no_grad():
                output = copied(network).train(training)(*model_arguments(batch))
        except Exception:  # foreign code may raise anything; the probes that follow name the site
            return
        if isinstance(output, Tensor):
            shape = tuple(output.shape)
            if len(shape) == 4 and data.task == "classification":
                remedy = "try model=convnet, or data=shapes, whose pixels have a class each"
        else:
            shape, remedy = f"a {type(output).__name__}", "return the scores alone"
        if shape != wanted:
            mode = " in training" if training else ""
            raise UserError(
                f"model._target_={target} returns {shape}{mode} for inputs of shape "
                f"{tuple(batch['inputs'].shape)}; data={data.name} needs {wanted}: {remedy}"
            )


def check_optimizer_step(recipe: Recipe, network: nn.Module) -> Optimizer:
    """Takes a step with the training's optimizer, and checks that it holds every parameter."""
    network = copied(network)
    name = f"optim._target_={recipe.settings.optim.target}"
    try:
        optimizer = recipe.build_optimizer(network)
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise UserError(f"{name} returned a {kind}, not a torch.optim.Optimizer")
        check_optimizer(network, optimizer)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return optimizer
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        words = [name]
        for knob, value in (recipe.settings.optim.model_extra or {}).items():
            if not knob.startswith("_"):
                words.append(f"optim.{knob}={as_typed(value)}")
        raise UserError(f"{' '.join(words)}: {one_line(error)}") from error


def check_optimizer(network: nn.Module, optimizer: Optimizer) -> None:
    """Raises UserError for a parameter that requires a gradient but is in no group.

    Args:
        optimizer: built for the parameters of this network.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and id(parameter) not in trained
    ]
    if missing:
        raise UserError(
            f"parameter {name_some(missing)} requires a gradient but is not in the optimizer; "
            "try another optim, or set requires_grad=False on what is not to be trained"
        )


def why_alone(recipe: Recipe, optimizer: Optimizer) -> str | None:
    """Why each seed must train by itself; None if seeds may share a stack."""
    watching, schedule = [describe_monitor(each) for each in recipe.callbacks()], recipe.schedule
    if schedule.monitor is not None:
        watching.append(f"{schedule.name} acts on {schedule.monitor}")
    for what in filter(None, watching):
        return f"{what}, and seeds that train together would all follow their mean"
    if can_train_a_stack(optimizer):
        return None
    return f"{type(optimizer).__name__} may look at more than one value at a time"


def check_norm_batch_size(recipe: Recipe) -> None:
    """Refuses a norm that mixes samples and would need statistics over several devices."""
    typed = recipe.settings.norm_batch_size
    most, num_devices = recipe.sizes.norm, recipe.settings.trainer.num_processes
    if typed is not None and typed > most:
        raise UserError(
            f"norm_batch_size={typed}: each of {num_devices} devices has {most} samples of each "
            f"forward; try norm_batch_size={most}, or norm=sync"
        )


def check_view(view: View, network: nn.Module, data: Data) -> None:
    """Refuses a size of images that a data set lacks, or that the network cannot be shown."""
    key = f"evaluate_at={view.name}"
    refuse_side(data, view.side, key)
    if view.crop is not None:
        refuse_empty_centre(data, view.crop, key)
    sides = (view.side, view.side) if view.side else data.stored_shape[1:]
    is_map = data.task == "segmentation"
    wanted = (2, data.num_outputs, *(sides if is_map else ()))
    images = torch.zeros(2, data.input_shape[0], *sides)
    try:
        with fixed_draws(), torch.no_grad():
            output = copied(network).eval()(images)
        if tuple(output.shape) != wanted:
            raise ValueError(f"it returns {tuple(output.shape)}, not {wanted}")
    except Exception as error:  # foreign code may raise anything
        raise UserError(
            f"{key}: the network cannot be shown images of {sides[0]}x{sides[1]} "
            f"({one_line(error)}); drop it, or try another size or network"
        ) from error


def check_evaluation(recipe: Recipe, data: Data, traits: Traits) -> None:
    """Refuses a batch larger than a split, and statistics without meaning.

    Args:
        recipe: of a norm that was probed.
    """
    for kind in recipe.statistics:
        reads_batch = kind in STATISTICS and STATISTICS[kind].reads_batch
        if reads_batch and traits.leaks_future_in_training:
            raise UserError(
                f"evaluate_with={kind}: these statistics of this norm include later positions of "
                "the text, so the loss is meaningless; try evaluate_with=[running,precise]"
            )
    sizes = recipe.evaluation_batch_sizes
    if not sizes:
        return
    for split in ("val", "test"):
        num_samples = len(getattr(data, split))
        if max(sizes) > num_samples:
            raise UserError(
                f"evaluate_batch_sizes: {max(sizes)} is more than the {num_samples} samples "
                f"of {split}; try evaluate_batch_sizes=[{num_samples}] or less"
            )
    single = single_valued(traits.reaches, min(sizes))
    if single:
        raise UserError(
            f"evaluate_batch_sizes={min(sizes)} leaves one value per statistic at "
            f"{name_some(single)}; try evaluate_batch_sizes=[{2 * min(sizes)}]"
        )
