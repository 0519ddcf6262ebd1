"""Which evaluations a config asks for, and which of them this training could not answer."""

from __future__ import annotations

import logging

from omegaconf import DictConfig
from torch import nn

from normexp.batching.sizes import Sizes
from normexp.checks.probing import probe_batch
from normexp.checks.reach import measure_reaches
from normexp.checks.sites import name_some, probe_sites
from normexp.checks.statistics_size import count_values
from normexp.checks.traits import PROBE_SAMPLES, Traits
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.tasks.evaluation import EvaluationPlan

logger = logging.getLogger(__name__)


def plan_evaluation(
    cfg: DictConfig, sizes: Sizes, data: Data, traits: Traits, network: nn.Module
) -> EvaluationPlan:
    """The plan that `evaluate_with` and its companions in `cfg` ask for.

    Raises:
        UserError: batch statistics of more samples than a split has, or of one value, or of a norm
            that reads later positions of a text through them.
    """
    asked = tuple(cfg.evaluate_with)
    batch_sizes: tuple[int, ...] = ()
    if "batch" in asked:
        batch_sizes = tuple(cfg.evaluate_batch_sizes or [sizes.norm])
        _check_batch_sizes(batch_sizes, data)
        _check_leak(traits)
        if traits.mixes_samples:
            _check_values(min(batch_sizes), network, data)
        else:
            batch_sizes = ()
            logger.info("no batch statistics to evaluate with: the norm mixes no samples")
    return EvaluationPlan(
        statistics=asked,
        precise_samples=cfg.precise_samples,
        group_size=sizes.norm,
        batch_sizes=batch_sizes,
        every_epoch=cfg.evaluate_every_epoch,
    )


def _check_batch_sizes(batch_sizes: tuple[int, ...], data: Data) -> None:
    """Every split must fill at least one batch."""
    for split in ("val", "test"):
        num_samples = len(getattr(data, split))
        if max(batch_sizes) > num_samples:
            raise UserError(
                f"evaluate_batch_sizes: {max(batch_sizes)} is more than the {num_samples} samples "
                f"of {split}; try evaluate_batch_sizes=[{num_samples}] or less"
            )


def _check_leak(traits: Traits) -> None:
    if traits.leaks_future_in_training:
        raise UserError(
            "evaluate_with=batch: the statistics of a batch show this norm later positions of the "
            "text, so that no loss is a likelihood; try evaluate_with=[running,precise]"
        )


def _check_values(batch_size: int, network: nn.Module, data: Data) -> None:
    sites = probe_sites(network, probe_batch(data, PROBE_SAMPLES))
    counts = count_values(measure_reaches(sites, training=True), batch_size)
    single = [name for name, count in counts.items() if count == 1]
    if single:
        raise UserError(
            f"evaluate_batch_sizes={batch_size} leaves one value per statistic at "
            f"{name_some(single)}; try evaluate_batch_sizes=[{2 * batch_size}]"
        )
