"""When a training is evaluated with more than running averages, and what is recorded of it."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, Replicas
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.site import named_sites
from normexp.norms.state import State
from normexp.training.fit import placed, quiet_lightning
from normexp.training.module import (
    Columns,
    Scorer,
    SplitScore,
    TrainingTask,
    batch_statistics,
    block_size,
    gather,
    holding,
    run,
    shuffled,
)
from normexp.training.recorder import finite_mean


@contextmanager
def momentum_at_one(replicas: Replicas) -> Iterator[None]:
    """Running averages forget all but the newest forward, and can be pooled, while inside."""
    with ExitStack() as borrowed:
        for _, site in named_sites(replicas):
            for module in site.modules():
                if hasattr(module, "momentum"):
                    borrowed.callback(setattr, module, "momentum", module.momentum)
                    module.momentum = 1.0  # type: ignore[assignment]
                if _has_moments(module) and not hasattr(module, "merge_state"):
                    _lend_pooling(module, borrowed)
        yield


def _has_moments(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_buffers(recurse=False)}
    return {"running_mean", "running_var"} <= names


def _lend_pooling(norm: Any, borrowed: ExitStack) -> None:
    """Gives a foreign norm that keeps moments as torch.nn does what the shipped ones have."""
    counter = torch.zeros(norm.running_mean.shape[:-1], dtype=torch.int64)  # () or (S,)
    norm.register_buffer("num_values", counter.to(norm.running_mean.device), persistent=False)
    borrowed.callback(delattr, norm, "num_values")
    norm.merge_state = _pool_moments
    borrowed.callback(delattr, norm, "merge_state")
    borrowed.callback(norm.register_forward_pre_hook(_count_values).remove)


def _count_values(norm: Any, inputs: tuple[Tensor, ...]) -> None:
    norm.num_values.fill_(inputs[0].numel() // norm.running_mean.shape[-1])


def _pool_moments(start: State, parts: list[State], shares: list[float]) -> State:
    """Moments of all parts' values, each part left by one forward at momentum 1."""
    del start, shares  # each part knows how many values it saw
    names = ("running_mean", "running_var", "num_values")
    means, variances, counts = (torch.stack([part[name] for part in parts]) for name in names)
    num = counts[..., None].to(means.dtype)  # (parts, ..., 1)
    weights = num / num.sum(dim=0)
    mean = (weights * means).sum(dim=0)
    within = variances * (num - 1) / num
    var = (weights * (within + (means - mean).square())).sum(dim=0)
    total = num.sum(dim=0)
    unbiased = var * total / (total - 1).clamp(min=1)
    return {"running_mean": mean, "running_var": unbiased, "num_values": counts.sum(dim=0)}


def undo_bessel(replicas: Replicas) -> None:
    """From the unbiased variance, which running averages hold, to that of the population.

    A norm whose running variance is the biased one says so by `unbiased_running_var = False`.
    """
    for _, site in named_sites(replicas):
        for module in site.modules():
            averages_unbiased = getattr(module, "unbiased_running_var", True)
            if _has_moments(module) and hasattr(module, "num_values") and averages_unbiased:
                norm: Any = module
                num = norm.num_values[..., None].to(norm.running_var.dtype)
                norm.running_var.mul_(torch.where(num > 1, (num - 1) / num, 1))


Gap = dict[str, dict[str, float]]
SiteGaps = dict[str, Gap]


def moment_gaps(replicas: Replicas, population: list[State]) -> list[SiteGaps]:
    """For each replica and site, its running averages now against the moments of `population`.

    Over the channels whose population variance is above 0, the mean and the maximum of
        mean_shift       |running_mean - mean| / sqrt(var)
        log2_var_ratio   log2(running_var / var); its maximum is the value largest in size
    Sites that keep no running_mean and running_var are absent.
    """
    running = replicas.read_buffers()
    return [
        _gaps_of(_own(replicas, running, index), _own(replicas, population, index))
        for index in range(replicas.num_replicas)
    ]


def _own(replicas: Replicas, states: list[State], index: int) -> State:
    """The buffers of replica `index`."""
    if not replicas.is_stacked:
        return states[index]
    return {name: value[index] for name, value in states[0].items()}


def _gaps_of(running: State, population: State) -> SiteGaps:
    gaps = {}
    for name in population:
        owner, _, leaf = name.rpartition(".")
        variance = f"{owner}.running_var"
        if leaf == "running_mean" and variance in population:
            difference = running[name] - population[name]
            gap = _gap(difference, population[variance], running[variance])
            if gap is not None:
                gaps[re.sub(r"(\.norm)+$", "", owner)] = gap  # the site's own name
    return gaps


def _gap(difference: Tensor, variance: Tensor, running_variance: Tensor) -> Gap | None:
    shift = difference.abs() / variance.sqrt()
    ratio = torch.log2(running_variance / variance)
    finite = shift.isfinite() & ratio.isfinite()  # not a channel that is constant
    if not finite.any():
        return None
    shift, ratio = shift[finite], ratio[finite]
    return {
        "mean_shift": {"mean": shift.mean().item(), "max": shift.max().item()},
        "log2_var_ratio": {
            "mean": ratio.mean().item(),
            "max": ratio[ratio.abs().argmax()].item(),
        },
    }


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Population:
    """Running state as of `num_samples` samples: buffers by name, for each tree of the replicas.

    `gaps` has, for each replica, how far the running averages of training lie from it.
    """

    states: list[State]
    num_samples: int
    gaps: list[SiteGaps]


@torch.no_grad()
def measure_population(
    replicas: Replicas, data: Data, *, num_samples: int, group_size: int
) -> Population | None:
    """Moments of training samples by forwards in training mode, pooled; the replicas stay as are.

    Each site's norm sees groups of `group_size` samples, as in training; the last may be shorter,
    but a lone last sample is left out. With a group's mean m_i and biased variance v_i over n_i
    values, w_i = n_i / sum n_i: mean = sum w_i m_i and var = sum w_i (v_i + (m_i - mean)^2). That
    is the population variance of all values: the correction n / (n - 1) in running variances is
    undone (arXiv:2105.07576). A norm with another kind of state pools it as its own merge_state
    does, its momentum at 1.

    Args:
        num_samples: the most to use, 2 or more: the first of a random order of the training split,
            not augmented.

    Returns:
        None where no norm has running state that a training forward at momentum 1 replaces.
    """
    indices = shuffled(data, "train")[:num_samples]
    if len(indices) % group_size == 1 and group_size > 1:
        indices = indices[:-1]
        logger.info("precise statistics leave out a last sample that would be a group of its own")
    with batch_statistics(replicas, group_size), momentum_at_one(replicas):
        moved = _replaced_buffers(replicas, gather(replicas, data, "train", indices[:group_size]))
        if not moved:
            return None
        start, ends, shares = replicas.read_buffers(), [], []
        for block in indices.split(block_size(replicas, group_size)):
            replicas.write_buffers(start)  # where a forward uses running state, all use the same
            run(replicas, gather(replicas, data, "train", block))
            ends.append(replicas.read_buffers())
            shares.append(len(block) / len(indices))
        replicas.merge_buffers(start, ends, shares)
        undo_bessel(replicas)
        states = [{name: state[name] for name in moved} for state in replicas.read_buffers()]
    return Population(states, len(indices), moment_gaps(replicas, states))


def _replaced_buffers(replicas: Replicas, batch: Batch) -> list[str]:
    """Names of the running state: what a training forward moves; none where it does not replace it.

    Whether it replaces is seen at the first site, whose inputs no running state can reach: the
    state afterwards must not depend on the one before. So a norm whose momentum means the opposite,
    or that has none, is found out.
    """
    start = replicas.read_buffers()
    run(replicas, batch)
    once = replicas.read_buffers()[0]
    floats = [name for name, value in once.items() if value.is_floating_point()]
    moved = [name for name in floats if not torch.equal(once[name], start[0][name])]
    sites = (name for name, _ in named_sites(replicas.trees[0]))
    below = ([n for n in moved if n.startswith(f"{site}.")] for site in sites)
    first = next((names for names in below if names), [])
    replicas.write_buffers([{**s, **{name: s[name] + 1 for name in first}} for s in start])
    run(replicas, batch)
    again = replicas.read_buffers()[0]
    replicas.write_buffers(start)
    for name in first:
        places = once[name] != start[0][name]  # no padded position, which has no new value
        if not torch.allclose(once[name][places], again[name][places], equal_nan=True):
            return []
    return moved


Block = tuple[Tensor, int]  # indices of a forward's samples, and how many from the first count


@torch.no_grad()
def score_precise(task: Scorer, population: Population, splits: Sequence[str]) -> Columns:
    """Metrics of each split with the moments of `population` in the place of running averages."""
    metrics: Columns = {}
    with holding(task.replicas, population.states):
        for split in splits:
            indices = torch.arange(len(getattr(task.data, split)))
            blocks = ((block, len(block)) for block in indices.split(block_size(task.replicas)))
            metrics |= _score(task, split, blocks, "precise")
    return metrics


@torch.no_grad()
def score_batch(task: Scorer, batch_size: int, splits: Sequence[str]) -> Columns:
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


def _score(task: Scorer, split: str, blocks: Iterator[Block], suffix: str) -> Columns:
    score = SplitScore(task, split)
    for indices, num_counted in blocks:
        score.add(indices, num_counted)
    return {f"{split}/{name}@{suffix}": column for name, column in score.metrics().items()}


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
