"""Builds the parts of a cell, and refuses those that do not fit each other or the machine."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from normexp.batching.replicas import model_arguments
from normexp.batching.speed import stacking_pays
from normexp.build import (
    NetworkBuilder,
    build_callbacks,
    build_data,
    build_network,
    build_norm,
    build_optimizer,
    build_schedule,
    logger_target,
)
from normexp.cells.plan import TrainingPlan, plan_training
from normexp.checks.integrity import check_optimizer
from normexp.checks.preflight import Traits
from normexp.checks.probe import fixed_draws
from normexp.checks.sites import probe_batch
from normexp.config.compose import DEFAULT_SCHEDULE, shipped_defaults
from normexp.config.rules import as_typed
from normexp.data.dataset import Data
from normexp.errors import UserError, first_line
from normexp.norms.factory import NormFactory
from normexp.norms.none import NoNorm
from normexp.norms.site import named_sites
from normexp.norms.slots import PLACES, set_but_unused
from normexp.records.identity import digest_of_data, digest_with_weights, source_line_of
from normexp.training.callbacks import describe_monitor
from normexp.training.devices import device_type
from normexp.training.evaluation import criterion_of
from normexp.training.optim import parameter_groups, stacking_obstacle_of

logger = logging.getLogger(__name__)

MAX_KEPT = 2  # data sets kept in memory at once
COPIES = 3  # of each parameter: value, gradient and optimizer state
GIB = 2**30
OPTIM_SCHEDULE = ("schedule", "warmup")  # keys of `optim` that `schedule` replaces
WITHOUT_NORM = ("pre", "parallel")  # placements that differ even without norms


@dataclass(frozen=True)
class CellDraft:
    """The parts that a config builds, before they are checked together."""

    cfg: DictConfig
    choices: Mapping[str, str]  # the choice in each config group
    files_digest: str | None  # of the files that data and weights are read from; None if unknown
    data: Data
    plan: TrainingPlan
    norm: NormFactory
    build: NetworkBuilder
    network: nn.Module  # of the first seed

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the metrics that a validation measures."""
        return [f"val/{name}" for name in criterion_of(self.data).metrics]


def build_draft(cfg: DictConfig, choices: Mapping[str, str]) -> CellDraft:
    """Builds the parts of a cell. Raises UserError for one that cannot be built."""
    files_digest = digest_with_weights(digest_of_data(cfg.data), cfg.model)
    data = load_data(cfg, files_digest)
    plan = plan_training(cfg, len(data.train))
    norm = build_norm(cfg, plan.sizes, data, num_steps=plan.num_steps, momentum=plan.norm_momentum)
    build = build_network(cfg, norm, data)
    return CellDraft(cfg, choices, files_digest, data, plan, norm, build, build(cfg.seed))


def load_data(cfg: DictConfig, files_digest: str | None) -> Data:
    """The data set of a config, see `build_data`; cached, so do not write to its tensors.

    Args:
        files_digest: part of the cache key, so that changed files are read again. Computed before
            the call: a file that changes meanwhile then has another digest the next time.
    """
    return _load_data(OmegaConf.to_yaml(cfg.data, resolve=True, sort_keys=True), files_digest)


@lru_cache(maxsize=MAX_KEPT)
def _load_data(config: str, _files_digest: str | None) -> Data:
    return build_data(OmegaConf.create({"data": OmegaConf.create(config)}))


@contextmanager
def keeping_data() -> Iterator[None]:
    """Caches data sets for the cells inside the block; the next command reads them again."""
    try:
        yield
    finally:
        _load_data.cache_clear()


# --- The network ---------------------------------------------------------------------------------


def check_network(draft: CellDraft) -> None:
    """Refuses slots and placements without effect, and outputs that do not fit the data."""
    _check_slots(draft)
    _check_placement(draft)
    _check_outputs(draft)


def _check_slots(draft: CellDraft) -> None:
    """Refuses slots that the command sets and the model lacks; logs those that the norm sets."""
    cfg, norm, model = draft.cfg, draft.norm, draft.choices["model"]
    for key in set_but_unused(cfg, norm.used):
        lacks, fits = PLACES[key]
        raise UserError(f"{key}={as_typed(cfg[key])}: model={model} has {lacks}; try {fits}")
    for key in set_but_unused(cfg.norm, norm.used):
        lacks, _ = PLACES[key]
        value = as_typed(cfg.norm[key])
        logger.info("the norm's %s=%s has no effect: model=%s has %s", key, value, model, lacks)


def _check_placement(draft: CellDraft) -> None:
    """Refuses a placement that, without norms, would be the network of placement=pre again."""
    placement = draft.norm.slots.placement
    if "placement" not in draft.norm.used or placement in WITHOUT_NORM:
        return
    if all(isinstance(site.norm, NoNorm) for _, site in named_sites(draft.network)):
        raise UserError(
            f"placement={placement}: norm={draft.choices['norm']} has no norm to place; try "
            "placement=null, or norm=rms"
        )


def _check_outputs(draft: CellDraft) -> None:
    """Refuses a model that does not score every class, or token, of every sample."""
    data = draft.data
    batch = probe_batch(data, 2)
    try:
        with fixed_draws(), torch.no_grad():
            output = copy.deepcopy(draft.network).eval()(*model_arguments(batch))
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
            f"model._target_={draft.cfg.model._target_} returns {shape} for inputs of shape "
            f"{tuple(batch['inputs'].shape)}; data={data.name} needs {wanted}: {remedy}"
        )


# --- The training --------------------------------------------------------------------------------


def check_training(draft: CellDraft) -> None:
    """Refuses an optimizer, a schedule or a logger that cannot work."""
    _check_optimizer(draft)
    _check_own_schedule(draft)
    if "custom" in draft.cfg.logger:
        logger_target(draft.cfg)


def _check_optimizer(draft: CellDraft) -> None:
    """Takes a step with the training's optimizer, and checks that it holds every parameter."""
    optim, plan = draft.cfg.optim, draft.plan
    network = copy.deepcopy(draft.network)
    groups = parameter_groups(network, weight_decay=optim.weight_decay, decay_norm=optim.decay_norm)
    try:
        make = build_optimizer(draft.cfg, momentum=plan.optimizer_momentum)
        optimizer = make(groups, lr=plan.lr)
        check_optimizer(network, optimizer)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        line = source_line_of(error)
        raise UserError(f"optim._target_={optim._target_}: {first_line(error)}{line}") from error


def _check_own_schedule(draft: CellDraft) -> None:
    """Refuses keys of `optim` that a schedule replaces, and a monitor that is not a metric."""
    cfg, metrics = draft.cfg, draft.metrics
    if cfg.get("schedule") is None:
        return
    defaults = shipped_defaults("optim", draft.choices["optim"]) or DEFAULT_SCHEDULE
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


def why_alone(draft: CellDraft) -> str | None:
    """Why each seed must train by itself; None if seeds may share a stack.

    Raises:
        UserError: a schedule or callback that cannot work.
    """
    cfg, plan = draft.cfg, draft.plan
    watching = describe_monitor(build_callbacks(cfg, draft.metrics))
    if (metric := build_schedule(cfg, plan.num_steps).monitor) is not None:
        watching = f"{cfg.schedule._target_.rpartition('.')[2]} looks at {metric}"
    if watching is not None:
        return f"{watching}, which would be a mean over a stack"
    obstacle = stacking_obstacle_of(build_optimizer(cfg, momentum=plan.optimizer_momentum))
    name = cfg.optim._target_.rpartition(".")[2]
    return None if obstacle is None else f"{name} cannot train a stack: {obstacle}"


def check_memory(draft: CellDraft, traits: Traits) -> int:
    """The least memory of a training, in bytes: parameters, gradients, optimizer, inputs of sites.

    Raises:
        UserError: the device has less.
    """
    cfg = draft.cfg
    device = device_type(cfg.trainer.accelerator)
    size = 8 if cfg.trainer.precision == "64-true" else 4
    num_parameters = sum(p.numel() for p in draft.network.parameters())
    elements = draft.plan.sizes.micro * traits.elements_per_sample
    is_stacked = cfg.stack is not False and stacking_pays(device, cfg.replicas, elements)
    at_once = cfg.replicas if is_stacked else 1
    needed = size * (COPIES * num_parameters * cfg.replicas + 2 * elements * at_once)
    available = memory_of(device)
    if needed > available:
        fits = int(float(f"{0.9 * cfg.replicas * available / needed:.0e}"))
        remedy = f"replicas={fits}" if fits else "a smaller model, or micro_batch_size=..."
        raise UserError(
            f"replicas={cfg.replicas} at micro_batch_size={draft.plan.sizes.micro} "
            f"need at least {needed / GIB:.1f} GiB of memory, and this machine has "
            f"{available / GIB:.1f}; try {remedy}"
        )
    return needed


def memory_of(device: str) -> int:
    """The total memory of a device, in bytes."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" for none
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(installed, int(text)) if text.isdecimal() else installed
