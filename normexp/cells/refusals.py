"""What a cell is refused for once it is built: keys, outputs, optimizer, memory."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from normexp.batching.replicas import model_arguments
from normexp.batching.speed import stacks
from normexp.build import build_callbacks, build_optimizer, build_schedule
from normexp.cells.naming import OPTIM_SCHEDULE
from normexp.cells.plan import Plan
from normexp.checks.integrity import check_optimizer as check_covered
from normexp.checks.probe import fixed_draws
from normexp.checks.sites import probe_batch
from normexp.config.compose import DEFAULT_SCHEDULE, shipped_config, shipped_defaults
from normexp.config.rules import as_typed, in_identity
from normexp.config.target import plain
from normexp.data.dataset import Data
from normexp.errors import UserError, first_line
from normexp.norms.factory import NormFactory
from normexp.norms.none import NoNorm
from normexp.norms.site import named_sites
from normexp.norms.slots import PLACES, without_place
from normexp.records.identity import place_of
from normexp.training.callbacks import monitored
from normexp.training.fit import device_type
from normexp.training.optim import parameter_groups, stacking_obstacle_of

logger = logging.getLogger(__name__)

COPIES = 3  # of each parameter: its value, its gradient and a state of the optimizer
GIB = 2**30
WITHOUT_NORM = ("pre", "parallel")  # placements that are different networks without any norm


class WatchedConfig(DictConfig):
    """A config that keeps the names of its top-level keys that were read, in `keys_read`."""

    def __init__(self, content: DictConfig) -> None:
        super().__init__(content)
        object.__setattr__(self, "keys_read", set())

    def __getattr__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getattr__(key)

    def __getitem__(self, key: Any) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default_value: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default_value)


def check_slots(cfg: DictConfig, norm: NormFactory, *, model: str) -> None:
    """Refuses a slot of the config that the model does not have; logs one set by the norm."""
    for key in without_place(cfg, norm.used):
        lacks, fits = PLACES[key]
        raise UserError(f"{key}={as_typed(cfg[key])}: model={model} has {lacks}; try {fits}")
    for key in without_place(cfg.norm, norm.used):
        lacks, _ = PLACES[key]
        value = as_typed(cfg.norm[key])
        logger.info("the norm's %s=%s has no effect: model=%s has %s", key, value, model, lacks)


def check_placement(norm: NormFactory, network: nn.Module, *, choice: str) -> None:
    """Refuses a placement of norms that are not there, which would be placement=pre again."""
    placement = norm.slots.placement
    if "placement" not in norm.used or placement in WITHOUT_NORM:
        return
    if all(isinstance(site.norm, NoNorm) for _, site in named_sites(network)):
        raise UserError(
            f"placement={placement}: norm={choice} has no norm to place; try placement=null, or "
            "norm=rms"
        )


def check_outputs(cfg: DictConfig, network: nn.Module, data: Data) -> None:
    """Raises UserError unless the model scores every class, or token, of every sample."""
    batch = probe_batch(data, 2)
    try:
        with fixed_draws(), torch.no_grad():
            output = copy.deepcopy(network).eval()(*model_arguments(batch))
    except Exception:  # of foreign code, any kind: the probes that follow name the site
        return
    wanted = (*batch["targets"].shape, data.num_outputs)
    shape = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
    if shape != wanted:
        raise UserError(
            f"model._target_={cfg.model._target_} returns {shape} for inputs of shape "
            f"{tuple(batch['inputs'].shape)}; data={data.name} needs {wanted}: set the last "
            "size, or take it from an argument `num_outputs` or `num_classes`"
        )


def check_read(cfg: DictConfig, keys_read: set[str]) -> None:
    """Refuses a value that would give the training an id of its own, but that nothing reads."""
    defaults = shipped_config()
    for key, value in plain(cfg).items():
        if key not in keys_read and in_identity(key) and value != defaults.get(key):
            raise UserError(
                f"{key}={as_typed(value)}: nothing reads this key, so the training would be that "
                f"of {key}={as_typed(defaults.get(key))}"
            )


def check_optimizer(cfg: DictConfig, plan: Plan, network: nn.Module) -> None:
    """Builds the training's optimizer, to check that it holds every parameter."""
    network = copy.deepcopy(network)
    groups = parameter_groups(
        network, weight_decay=cfg.optim.weight_decay, decay_norm=cfg.optim.decay_norm
    )
    try:
        optimizer = build_optimizer(cfg, momentum=plan.optimizer_momentum)(groups, lr=plan.lr)
        check_covered(network, optimizer)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except UserError:
        raise
    except Exception as error:  # of the user's class, any kind
        place = place_of(error)
        raise UserError(
            f"optim._target_={cfg.optim._target_}: {first_line(error)}{place}"
        ) from error


def check_own_schedule(cfg: DictConfig, optim: str, metrics: Sequence[str]) -> None:
    """Refuses keys of `optim` that a schedule takes the place of, and a metric that is not there.

    Args:
        optim: the name of the optimizer.
        metrics: of the validation.
    """
    if cfg.get("schedule") is None:
        return
    defaults = shipped_defaults("optim", optim) or DEFAULT_SCHEDULE
    for key in OPTIM_SCHEDULE:
        if cfg.optim[key] != defaults[key]:
            raise UserError(
                f"optim.{key}={as_typed(cfg.optim[key])}: nothing reads this key, since schedule "
                "is set; drop one of them"
            )
    monitor = cfg.schedule.get("monitor", "val/loss")
    if monitor not in metrics:
        raise UserError(
            f"schedule.monitor={monitor} is not a metric of the validation; "
            f"try {', '.join(metrics)}"
        )


def why_alone(cfg: DictConfig, plan: Plan, metrics: Sequence[str]) -> str | None:
    """Why each seed must train by itself; None if seeds may share a stack.

    Raises:
        UserError: a schedule or callback that cannot work.
    """
    schedule = build_schedule(cfg, plan.num_steps)
    watching = monitored(build_callbacks(cfg, metrics))
    if schedule.monitor is not None:
        watching = f"{cfg.schedule._target_.rpartition('.')[2]} looks at {schedule.monitor}"
    if watching is not None:
        return f"{watching}, which would be a mean over a stack"
    obstacle = stacking_obstacle_of(build_optimizer(cfg, momentum=plan.optimizer_momentum))
    name = cfg.optim._target_.rpartition(".")[2]
    return None if obstacle is None else f"{name} cannot train a stack: {obstacle}"


def needed_memory(cfg: DictConfig, num_parameters: int, elements_per_forward: int) -> int:
    """Bytes that a training needs at least: parameters, optimizer and what the norms' sites see."""
    device = device_type(cfg.trainer.accelerator)
    size = 8 if cfg.trainer.precision == "64-true" else 4
    is_stacked = cfg.stack is not False and stacks(device, cfg.replicas, elements_per_forward)
    at_once = cfg.replicas if is_stacked else 1
    return size * (COPIES * num_parameters * cfg.replicas + 2 * elements_per_forward * at_once)


def check_memory(cfg: DictConfig, needed: int) -> None:
    """Raises UserError for a training that needs more memory than the device has."""
    available = memory_of(device_type(cfg.trainer.accelerator))
    if needed > available:
        fits = int(float(f"{0.9 * cfg.replicas * available / needed:.0e}"))
        remedy = f"replicas={fits}" if fits else "a smaller model, or micro_batch_size=..."
        raise UserError(
            f"replicas={cfg.replicas} at micro_batch_size={cfg.micro_batch_size or cfg.batch_size} "
            f"need at least {needed / GIB:.1f} GiB of memory, and this machine has "
            f"{available / GIB:.1f}; try {remedy}"
        )


def memory_of(device: str) -> int:
    """Bytes of memory that a device has, used or not."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" for none
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(installed, int(text)) if text.isdecimal() else installed
