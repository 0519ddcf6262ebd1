"""A cell made ready: its parts built, probed and named, before anything is trained or written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn

from normexp.batching.stacking import suitable_threads
from normexp.build import (
    NetworkBuilder,
    build_network,
    build_norm,
    build_optimizer,
    check_trainer,
)
from normexp.checks.causality import refusal_of
from normexp.checks.coverage import check_coverage
from normexp.checks.probing import first_line, probe_batch
from normexp.checks.splitting import check_split
from normexp.checks.traits import PROBE_SAMPLES, Traits, measure_traits
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.contract import NormFactory
from normexp.norms.slots import PLACES, changed, without_place
from normexp.records.identity import canonical, cell_id
from normexp.studies.evaluation_plan import plan_evaluation
from normexp.studies.kept_data import load_data
from normexp.studies.kinds import as_typed
from normexp.studies.naming import identity_of, record_of
from normexp.studies.plan import Plan, check_norm_batch_size, num_devices_of, plan_training
from normexp.tasks.evaluation import EvaluationPlan
from normexp.tasks.optimizer import parameter_groups

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """Everything about a training but its seed, built and checked."""

    cfg: DictConfig
    id: str
    identity: dict[str, Any]  # canonical config, the content of the id's hash
    record: dict[str, Any]  # plain values that go into result.json
    plan: Plan
    data: Data
    build: NetworkBuilder
    traits: Traits
    evaluation: EvaluationPlan
    num_parameters: int

    @property
    def title(self) -> str:
        return f"{self.record['norm']} on {self.record['data']}"

    @property
    def study_dir(self) -> Path:
        return Path(self.cfg.runs_dir) / self.cfg.study

    @property
    def num_devices(self) -> int:
        """Devices that train this cell together, on all nodes."""
        return num_devices_of(self.cfg)

    @property
    def directory(self) -> Path:
        return self.study_dir / self.id

    @property
    def elements_per_forward(self) -> int:
        """Values that reach all sites of one replica in one forward pass."""
        return self.plan.sizes.micro * self.traits.elements_per_sample

    @property
    def invalid(self) -> str | None:
        """Why no number of this cell may be compared; None where all may."""
        leak = self.traits.leak
        return None if leak is None else f"leaks the future at {leak.where}"


@suitable_threads(0)  # probes are small: two threads wait for each other longer than they save
def prepare_cell(cfg: DictConfig, choices: Mapping[str, str]) -> Cell:
    """Builds and probes what `cfg` asks for; a user's mistake is raised here, before any work.

    Args:
        choices: the name chosen in each config group, for the record.
    """
    check_trainer(cfg)
    data = load_data(cfg)
    plan = plan_training(cfg, len(data.train))
    norm = build_norm(cfg, plan.sizes, data, momentum=plan.norm_momentum)
    build = build_network(cfg, norm, data)
    network = build(cfg.seed)
    _check_slots(cfg, norm, model=choices["model"])
    check_split(network, plan.sizes)
    traits = measure_traits(network, data, plan.sizes, drop_last=cfg.drop_last)
    if traits.leak is not None and not cfg.allow_leak:
        raise UserError(refusal_of(traits.leak))
    if traits.mixes_samples:
        check_norm_batch_size(cfg, plan.sizes)
    _check_coverage(cfg, plan, network, data)
    evaluation = plan_evaluation(cfg, plan.sizes, data, traits, network)
    if not traits.mixes_samples and norm.norm_batch_size is not None:
        norm.norm_batch_size = None
        logger.info("the norm mixes no samples: every norm_batch_size is this one cell")
    slots = changed(norm.slots, norm.used)
    identity = canonical(identity_of(cfg, data, plan, slots), mixes_samples=traits.mixes_samples)
    return Cell(
        cfg=cfg,
        id=cell_id(identity),
        identity=identity,
        record=record_of(cfg, choices, plan, identity) | slots | _record_of_traits(traits),
        plan=plan,
        data=data,
        build=build,
        traits=traits,
        evaluation=evaluation,
        num_parameters=sum(p.numel() for p in network.parameters()),
    )


def _check_slots(cfg: DictConfig, norm: NormFactory, *, model: str) -> None:
    """Refuses a slot of the config for which the built model has no place; notes one of the norm's.

    Raises:
        UserError: with the models that have one.
    """
    for key in without_place(cfg, norm.used):
        lacks, fits = PLACES[key]
        raise UserError(f"{key}={as_typed(cfg[key])}: model={model} has {lacks}; try {fits}")
    for key in without_place(cfg.norm, norm.used):
        lacks, _ = PLACES[key]
        value = as_typed(cfg.norm[key])
        logger.info("the norm's %s=%s is left out: model=%s has %s", key, value, model, lacks)


def _check_coverage(cfg: DictConfig, plan: Plan, network: nn.Module, data: Data) -> None:
    """Builds the optimizer as the training will, to see that it holds every parameter."""
    groups = parameter_groups(
        network, weight_decay=cfg.optim.weight_decay, decay_norm=cfg.optim.decay_norm
    )
    try:
        optimizer = build_optimizer(cfg, momentum=plan.optimizer_momentum)(groups, lr=plan.lr)
    except (TypeError, ValueError) as error:
        raise UserError(f"optim._target_={cfg.optim._target_}: {first_line(error)}") from error
    check_coverage(network, optimizer, probe_batch(data, PROBE_SAMPLES))


def _record_of_traits(traits: Traits) -> dict[str, bool]:
    kept = (
        "mixes_samples",
        "mixes_samples_in_evaluation",
        "leaks_future",
        "leaks_future_in_training",
    )
    return {name: getattr(traits, name) for name in kept}
