"""When a training is evaluated with more than running averages, and what is recorded of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl

from normexp.tasks.fit import quiet_lightning
from normexp.tasks.population import Population, measure_population
from normexp.tasks.recorder import finite_mean
from normexp.tasks.scoring import score_batch, score_precise
from normexp.tasks.split_score import Columns
from normexp.tasks.strategy import placed
from normexp.tasks.training import TrainingTask

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationPlan:
    """Which statistics norms are evaluated with; running ones are by every validation and test.

    Args:
        statistics: what is to be recorded, of running, precise and batch.
        precise_samples: training samples for precise statistics.
        group_size: samples per group in those, the run's norm batch size.
        batch_sizes: samples per group in each evaluation with batch statistics; none without them.
        every_epoch: at every validation too, not only at the end.
    """

    statistics: tuple[str, ...]
    precise_samples: int
    group_size: int
    batch_sizes: tuple[int, ...]
    every_epoch: bool

    @property
    def adds(self) -> bool:
        """Whether there is more to record than metrics with running statistics."""
        return any(name != "running" for name in self.statistics)


class StatisticsEvaluation(pl.Callback):
    """Adds what the plan asks for to the metrics of a task: val and test at the end of its test.

    After the end, `population` has the precise statistics; None where there are none.
    """

    def __init__(self, plan: EvaluationPlan) -> None:
        self.plan = plan
        self.population: Population | None = None
        self._has_running_state = True  # until it is seen that it has none
        self._val_step: int | None = None  # where val was evaluated last

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.plan.every_epoch:
            assert isinstance(pl_module, TrainingTask)
            self._evaluate(trainer, pl_module, ("val",))
            self._val_step = pl_module.step

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingTask)
        val_is_done = self._val_step == pl_module.step
        self._evaluate(trainer, pl_module, ("test",) if val_is_done else ("val", "test"))
        log_gaps(self.population)
        pl_module.recorder.flush()  # a test is the last that is recorded of a run

    def state_dict(self) -> dict[str, Any]:
        return {"val_step": self._val_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._val_step = state_dict["val_step"]

    def content(self, task: TrainingTask, index: int) -> dict[str, Any]:
        """What evaluation.json holds of replica `index`: its latest metrics by statistics.

        `precise` also has num_samples, and `gap` how far running averages lie from it, by site.
        """
        found: dict[str, Any] = {}
        for name, column in task.final.items():
            metric, _, statistics = name.partition("@")
            kind = "batch" if statistics.startswith("batch") else statistics or "running"
            if kind in self.plan.statistics and math.isfinite(column[index]):
                found.setdefault(statistics or "running", {})[metric] = column[index]
        if self.population is not None and "precise" in found:
            found["precise"]["num_samples"] = self.population.num_samples
            found["gap"] = self.population.gaps[index]
        return found

    def _evaluate(self, trainer: pl.Trainer, task: TrainingTask, splits: Sequence[str]) -> None:
        metrics: Columns = {}
        with trainer.precision_plugin.forward_context():
            if "precise" in self.plan.statistics and self._has_running_state:
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
        if metrics:
            task.final.update(metrics)
            task.recorder.record(task.position(task.step), metrics)


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


def evaluate(task: TrainingTask, evaluation: StatisticsEvaluation, **options: Any) -> None:
    """Validates and tests a task that is not in training; `task.final` holds the metrics.

    Args:
        options: accelerator and precision, for the Trainer.
    """
    with quiet_lightning():
        trainer = pl.Trainer(
            devices=1,
            logger=False,
            callbacks=[evaluation],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **placed(options),
        )
        trainer.validate(task, verbose=False)
        trainer.test(task, verbose=False)
