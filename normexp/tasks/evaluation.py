"""Evaluating a stack with other statistics than running averages: precise ones, or a batch's own.

Their metrics carry a suffix: `val/accuracy@precise`, `test/loss@batch32`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from torch import Tensor

from normexp.batching.replicas import Batch, Measured
from normexp.errors import UserError
from normexp.tasks.frozen import batch_statistics, block_size, gather, holding, shuffled
from normexp.tasks.population import Population, measure_population
from normexp.tasks.recorder import finite_mean
from normexp.tasks.training import TrainingTask

logger = logging.getLogger(__name__)

STATISTICS = ("running", "precise", "batch")
Columns = dict[str, list[float]]
Block = tuple[Tensor, int]  # indices of a forward's samples, and how many from the first count


@dataclass(frozen=True)
class EvaluationPlan:
    """Which statistics norms are evaluated with, besides the running ones of every validation.

    Args:
        precise: whether to evaluate with precise statistics, of `precise_samples` samples in groups
            of `group_size`, the run's norm batch size.
        batch_sizes: samples per group in each evaluation with batch statistics.
        every_epoch: at every validation too, not only at the end.
    """

    precise: bool
    precise_samples: int
    group_size: int
    batch_sizes: tuple[int, ...]
    every_epoch: bool


class StatisticsEvaluation(pl.Callback):
    """Adds what the plan asks for to the metrics of a task: val and test at the end of its test.

    After the end, `population` has the precise statistics; None where there are none.
    """

    def __init__(self, plan: EvaluationPlan) -> None:
        self.plan = plan
        self.population: Population | None = None
        self._has_running_state = True  # until it is seen that it has none

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.plan.every_epoch:
            self._evaluate(trainer, pl_module, ("val",))

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluate(trainer, pl_module, ("val", "test"))
        log_gaps(self.population)

    def _evaluate(
        self, trainer: pl.Trainer, task: pl.LightningModule, splits: Sequence[str]
    ) -> None:
        assert isinstance(task, TrainingTask)
        metrics: Columns = {}
        with trainer.precision_plugin.forward_context():
            if self.plan.precise and self._has_running_state:
                self.population = measure_population(
                    task.replicas,
                    task.data,
                    num_samples=self.plan.precise_samples,
                    group_size=self.plan.group_size,
                )
                if self.population is None:
                    self._has_running_state = False
                    logger.info("no precise statistics: the norm keeps no running moments")
                else:
                    metrics |= score_precise(task, self.population, splits)
            for size in self.plan.batch_sizes:
                metrics |= score_batch(task, size, splits)
        task.final.update(metrics)
        task.recorder.record(task.position(task.step), metrics)
        task.recorder.flush()


@torch.no_grad()
def score_precise(task: TrainingTask, population: Population, splits: Sequence[str]) -> Columns:
    """Metrics of each split with the moments of `population` in the place of running averages."""
    metrics: Columns = {}
    with holding(task.replicas, population.states):
        for split in splits:
            indices = torch.arange(len(getattr(task.data, split)))
            blocks = ((block, len(block)) for block in indices.split(block_size(task.replicas)))
            metrics |= _score(task, split, blocks, "precise")
    return metrics


@torch.no_grad()
def score_batch(task: TrainingTask, batch_size: int, splits: Sequence[str]) -> Columns:
    """Metrics of each split, its norms using the statistics of batches of `batch_size` samples.

    Raises:
        UserError: a split has fewer samples.
    """
    metrics: Columns = {}
    with batch_statistics(task.replicas, batch_size):
        for split in splits:
            indices = shuffled(task.data, split)
            if batch_size > len(indices):
                raise UserError(
                    f"evaluate_batch_sizes={batch_size} is more than the {len(indices)} samples "
                    f"of {split}; try {len(indices)} or fewer"
                )
            size = block_size(task.replicas, batch_size)
            blocks = completed_blocks(indices, size, batch_size)
            metrics |= _score(task, split, blocks, f"batch{batch_size}")
    return metrics


def completed_blocks(indices: Tensor, size: int, batch_size: int) -> Iterator[Block]:
    """`indices` in blocks of `size`; in the last, samples from the first on complete a batch.

    Only those that stand for themselves count, so each sample counts once.
    """
    for block in indices.split(size):
        missing = -len(block) % batch_size
        yield torch.cat([block, indices[:missing]]), len(block)


def _score(task: TrainingTask, split: str, blocks: Iterator[Block], suffix: str) -> Columns:
    sums: dict[str, Tensor] = {}
    num_targets = 0
    for indices, num_counted in blocks:
        batch = gather(task.replicas, task.data, split, indices)

        def measure(output: Tensor, own: Batch, num: int = num_counted) -> Measured:
            return task.measure(output[:num], {name: value[:num] for name, value in own.items()})

        num_targets += batch["targets"][:num_counted].numel()
        for name, value in task.replicas.measure(batch, measure, shared=True).items():
            sums[name] = sums.get(name, 0) + value.double()
    means = {name: total / num_targets for name, total in sums.items()}
    named = task.summarise(means).items()
    return {f"{split}/{name}@{suffix}": column.tolist() for name, column in named}


def log_gaps(population: Population | None) -> None:
    """One line per site: running averages against the population, means over channels and runs."""
    if population is None:
        return
    for site in dict.fromkeys(site for gaps in population.gaps for site in gaps):
        found = [gaps[site] for gaps in population.gaps if site in gaps]
        shift = finite_mean([gap["mean_shift"]["mean"] for gap in found])
        ratio = finite_mean([gap["log2_var_ratio"]["mean"] for gap in found])
        logger.info(
            "running averages at %s: mean off by %.2f sd, log2 of variance off by %+.2f",
            *(site, shift, ratio),
        )
