"""A cell made ready: its parts built, probed and named, before anything is trained or written."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from normexp.batching.speed import suitable_threads
from normexp.build import (
    NetworkBuilder,
    build_data,
    build_network,
    build_norm,
    check_trainer,
    logger_maker,
)
from normexp.cells.naming import id_of, identity_of, record_of
from normexp.cells.plan import (
    Plan,
    check_norm_batch_size,
    plan_evaluation,
    plan_training,
)
from normexp.cells.refusals import (
    WatchedConfig,
    check_memory,
    check_optimizer,
    check_outputs,
    check_own_schedule,
    check_placement,
    check_read,
    check_slots,
    needed_memory,
    why_alone,
)
from normexp.checks.preflight import Traits, examine
from normexp.data.dataset import Data
from normexp.norms.slots import changed
from normexp.records.identity import digest_of_data, with_weights
from normexp.training.evaluation import EvaluationPlan, criterion_of

logger = logging.getLogger(__name__)

LONG_PROBE = 10  # seconds
MAX_KEPT = 2  # data sets kept in memory at once
RECORDED_TRAITS = (
    *("mixes_samples", "mixes_samples_in_evaluation", "leaks_future", "leaks_future_in_training"),
)

# Data with the digest of their files, by config, latest last; None outside `keeping_data`.
_kept: dict[str, tuple[Data, str | None]] | None = None


@contextmanager
def keeping_data() -> Iterator[None]:
    """Lets `load_data` load each data set once inside the block, even if its files change."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def load_data(cfg: DictConfig) -> tuple[Data, str | None]:
    """The data set of a config, see `build_data`, and the `digest_of_data` that it was read from.

    Do not write to its tensors.
    """
    kept = {} if _kept is None else _kept
    name = json.dumps(OmegaConf.to_container(cfg.data, resolve=True), sort_keys=True, default=str)
    found = kept.pop(name, None)
    if found is None:
        digest = digest_of_data(cfg.data)  # first: a file that changes meanwhile must not fit
        found = build_data(cfg), digest
    kept[name] = found
    while len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]
    return found


@dataclass(frozen=True)
class Cell:
    """Everything about a training except its seed, built and checked."""

    cfg: DictConfig
    id: str
    record: dict[str, Any]  # plain values that go into result.json, `identity_of` among them
    plan: Plan
    data: Data
    files_digest: str | None  # of the files that data and weights were read from
    build: NetworkBuilder
    traits: Traits
    evaluation: EvaluationPlan
    num_parameters: int
    memory: int  # bytes, see `needed_memory`
    alone: str | None  # why each seed trains by itself; None if seeds may share a stack

    @property
    def title(self) -> str:
        return f"{self.record['norm']} on {self.record['data']}"

    @property
    def study_dir(self) -> Path:
        return Path(self.cfg.runs_dir) / self.cfg.study

    @property
    def directory(self) -> Path:
        return self.study_dir / self.id

    @property
    def elements_per_forward(self) -> int:
        """The number of values that reach all sites of one replica in one forward pass."""
        return self.plan.sizes.micro * self.traits.elements_per_sample

    @property
    def invalid(self) -> str | None:
        """Why the numbers of this cell must not be compared; None if they may."""
        leak = self.traits.leak
        return None if leak is None else f"leaks the future at {leak}"


@suitable_threads(0)  # probes are too small for a second thread to pay
def prepare_cell(cfg: DictConfig, choices: Mapping[str, str]) -> Cell:
    """Builds, probes and names a cell. Raises every user mistake before any training.

    Args:
        choices: the name of what each config group holds.

    Raises:
        UserError: a value that cannot be trained, with the key and the remedy.
    """
    asked, cfg = cfg, WatchedConfig(cfg)
    check_trainer(cfg)
    if "custom" in cfg.logger:
        logger_maker(cfg)  # refuses what the target does not take
    data, data_digest = load_data(cfg)
    files_digest = with_weights(data_digest, cfg.model)
    plan = plan_training(cfg, len(data.train))
    norm = build_norm(cfg, plan.sizes, data, num_steps=plan.num_steps, momentum=plan.norm_momentum)
    build = build_network(cfg, norm, data)
    network = build(cfg.seed)
    check_slots(cfg, norm, model=choices["model"])
    check_placement(norm, network, choice=choices["norm"])
    check_outputs(cfg, network, data)
    traits = _probe(cfg, plan, network, data)
    check_optimizer(cfg, plan, network)
    metrics = [f"val/{name}" for name in criterion_of(data).metrics]
    check_own_schedule(cfg, choices["optim"], metrics)
    alone = why_alone(cfg, plan, metrics)
    evaluation = plan_evaluation(cfg, plan.sizes, data, traits)
    check_read(asked, cfg.keys_read)
    num_parameters = sum(p.numel() for p in network.parameters())
    elements = plan.sizes.micro * traits.elements_per_sample
    memory = needed_memory(cfg, num_parameters, elements)
    check_memory(cfg, memory)
    for note in plan.notes:
        logger.info(note)
    if alone is not None and cfg.replicas > 1:
        logger.info("each seed trains by itself: %s", alone)
    if not traits.mixes_samples and norm.norm_batch_size is not None:
        norm.norm_batch_size = None
        logger.info(
            "this norm does not mix samples, so norm_batch_size has no effect: training it once "
            "for all sizes"
        )
    slots = changed(norm.slots, norm.used)
    identity = identity_of(
        asked,
        data,
        plan,
        slots,
        mixes_samples=traits.mixes_samples,
        weights_digest=build.weights_digest,
    )
    return Cell(
        cfg=asked,
        id=id_of(identity, choices),
        record=record_of(choices, plan, identity, cfg)
        | slots
        | {name: getattr(traits, name) for name in RECORDED_TRAITS}
        | ({} if data.chance_accuracy is None else {"chance_accuracy": data.chance_accuracy}),
        plan=plan,
        data=data,
        files_digest=files_digest,
        build=build,
        traits=traits,
        evaluation=evaluation,
        num_parameters=num_parameters,
        memory=memory,
        alone=alone,
    )


def _probe(cfg: DictConfig, plan: Plan, network: nn.Module, data: Data) -> Traits:
    """What the network mixes and leaks. Raises UserError for what must not be trained."""
    start = time.perf_counter()
    traits = examine(network, data, plan.sizes, drop_last=cfg.drop_last, allow_leak=cfg.allow_leak)
    if (seconds := time.perf_counter() - start) > LONG_PROBE:
        logger.info("probing the network before training took %.0f s", seconds)
    if traits.mixes_samples:
        check_norm_batch_size(cfg, plan.sizes)
    return traits
