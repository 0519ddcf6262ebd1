"""Prepares a cell: builds its parts, and probes its network. Writes nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from normexp.batching.speed import suitable_threads
from normexp.build import NetworkBuilder, check_trainer
from normexp.cells.draft import (
    CellDraft,
    build_draft,
    check_memory,
    check_network,
    check_training,
    why_alone,
)
from normexp.cells.naming import identity_of, record_of
from normexp.cells.plan import TrainingPlan, check_norm_batch_size, plan_evaluation
from normexp.checks.preflight import Traits, examine
from normexp.config.spec import CellSpec
from normexp.data.dataset import Data
from normexp.records.logs import collected_messages
from normexp.records.sources import refuse_edited
from normexp.training.evaluation import EvaluationPlan

logger = logging.getLogger(__name__)

LONG_PROBE = 10  # seconds


@dataclass(frozen=True, eq=False)
class Cell:
    """Everything about a training except its seed, built and checked.

    Attributes:
        choices: the choice in each config group, such as {"norm": "group"}.
        record: plain values that go into result.json, see `record_of`.
        files_digest: digest of the files that data and weights were read from; None if unknown.
        memory: the least memory of a training, in bytes.
        alone: why each seed trains by itself; None if seeds may share a stack.
        messages: what was logged while the cell was prepared.
    """

    cfg: DictConfig
    choices: Mapping[str, str]
    id: str
    record: dict[str, Any]
    plan: TrainingPlan
    data: Data
    files_digest: str | None
    build: NetworkBuilder
    traits: Traits
    evaluation: EvaluationPlan
    num_parameters: int
    memory: int
    alone: str | None
    messages: Sequence[str]

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
        """The number of values entering all sites of one replica in one forward pass."""
        return self.plan.sizes.micro * self.traits.elements_per_sample

    @property
    def invalid(self) -> str | None:
        """Why the numbers of this cell must not be compared; None if they may."""
        leak = self.traits.leak
        return None if leak is None else f"leaks the future at {leak}"


@suitable_threads(0)  # probes are too small for a second thread to pay
def prepare_cell(spec: CellSpec) -> Cell:
    """Builds and probes a cell, and refuses every mistake that can be found before training.

    If its norm does not mix samples, the cell is `spec.without_norm_batch_size`.

    Raises:
        UserError: a value that cannot be trained, with the key and the remedy.
    """
    cfg, choices = spec.cfg, spec.choices
    assert cfg is not None, "refused before"
    with collected_messages() as messages:
        check_trainer(cfg)
        draft = build_draft(cfg, choices)
        refuse_edited(spec.sources)
        check_network(draft)
        traits = _probe(draft)
        check_training(draft)
        alone = why_alone(draft)
        evaluation = plan_evaluation(cfg, draft.plan.sizes, draft.data, traits)
        memory = check_memory(draft, traits)
        _log_deviations(draft, traits, alone)
        if not traits.mixes_samples:
            draft.norm.norm_batch_size = None  # a split has no effect, and costs time
            spec = spec.without_norm_batch_size
        identity = identity_of(draft, mixes_samples=traits.mixes_samples)
        return Cell(
            cfg=cfg,
            choices=choices,
            id=spec.id,
            record=record_of(draft, traits, identity),
            plan=draft.plan,
            data=draft.data,
            files_digest=draft.files_digest,
            build=draft.build,
            traits=traits,
            evaluation=evaluation,
            num_parameters=sum(p.numel() for p in draft.network.parameters()),
            memory=memory,
            alone=alone,
            messages=messages,
        )


def _probe(draft: CellDraft) -> Traits:
    """Measures what the network mixes and leaks. Raises UserError if it must not be trained."""
    cfg, sizes, start = draft.cfg, draft.plan.sizes, time.perf_counter()
    traits = examine(
        draft.network, draft.data, sizes, drop_last=cfg.drop_last, allow_leak=cfg.allow_leak
    )
    if (seconds := time.perf_counter() - start) > LONG_PROBE:
        logger.info("probing the network before training took %.0f s", seconds)
    if traits.mixes_samples:
        check_norm_batch_size(cfg, sizes)
    return traits


def _log_deviations(draft: CellDraft, traits: Traits, alone: str | None) -> None:
    """Logs how the training will differ from what was typed; the cell is no longer refused."""
    for note in draft.plan.notes:
        logger.info(note)
    if alone is not None and draft.cfg.replicas > 1:
        logger.info("each seed trains by itself: %s", alone)
    if not traits.mixes_samples and draft.norm.norm_batch_size is not None:
        logger.info(
            "this norm does not mix samples, so norm_batch_size has no effect: training it once "
            "for all sizes"
        )
