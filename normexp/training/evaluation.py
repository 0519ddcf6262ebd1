"""What a model minimises, and evaluation on splits with one kind of statistics at a time.

Kinds: `running` (the norms as they are), `precise` (moments pooled over training samples),
`own_share` (these, in which a sample's own moments weigh as much as in training) and `batch<k>` (of
batches of k samples). Metrics of all but the first have the kind as a suffix:
`val/accuracy@precise`. These are measured on copies of the replicas, so nothing has to be changed
back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from normexp.batching.copies import copied
from normexp.batching.draws import generator
from normexp.batching.replicas import Batch, InTurn, Measurements, Replicas, model_arguments
from normexp.data.dataset import Data
from normexp.norms.base import wide_dtype
from normexp.norms.contract import HasMomentum
from normexp.norms.moment_sites import (
    BATCH,
    NormSite,
    Population,
    can_be_shown,
    find_sites,
    inputs_to,
    pool_batches,
    watching,
    with_moments,
    write_populations,
)
from normexp.norms.site import merge_state, named_sites, read_state, write_state
from normexp.training.recipe import Recipe

logger = logging.getLogger(__name__)

Columns = dict[str, list[float]]  # a value per replica, by metric
SPLITS = ("train", "val", "test")
STACK_SAMPLES = 512  # per forward in evaluation, over all replicas; eight times that on a GPU


class Classification:
    """Cross-entropy in nats, and accuracy as the share of samples classified correctly.

    Attributes:
        metrics: names of what `summarise` returns.
    """

    metrics = ("loss", "accuracy")

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the loss summed over the batch's targets."""
        # output (N, num_classes), targets (N,)
        return cross_entropy(output, batch["targets"], reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measurements:
        """Returns `loss`, and `per_sample`: whether each sample is right (N,), for samples.npz."""
        return {
            "loss": self.loss(output, batch),
            "per_sample": output.argmax(dim=-1) == batch["targets"],
        }

    def summarise(self, split: str, loss: Tensor, per_sample: Tensor) -> Measurements:
        """Returns metrics (S,) from the mean loss over targets (S,) and `per_sample` (S, N)."""
        del split
        # argmax of NaN is class 0
        accuracy = torch.where(loss.isfinite(), per_sample.double().mean(dim=1), torch.nan)
        return {"loss": loss, "accuracy": accuracy}


class LanguageModeling:
    """Cross-entropy in nats per token, and in bits per byte of UTF-8 text; as `Classification`.

    Args:
        bytes_per_token: of each split.
    """

    metrics = ("loss", "bits_per_byte")

    def __init__(self, bytes_per_token: Mapping[str, float]) -> None:
        self.bytes_per_token = bytes_per_token

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()  # (N*T, V), (N*T,)
        return cross_entropy(logits, targets, reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measurements:
        """Each sample is a sequence's mean loss per token, in nats."""
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()
        losses = cross_entropy(logits, targets, reduction="none")  # (N*T,)
        return {
            "loss": losses.sum(),
            "per_sample": losses.unflatten(0, output.shape[:2]).mean(dim=1),
        }

    def summarise(self, split: str, loss: Tensor, per_sample: Tensor) -> Measurements:
        del per_sample
        return {"loss": loss, "bits_per_byte": loss / math.log(2) / self.bytes_per_token[split]}


Criterion = Classification | LanguageModeling


def criterion_of(data: Data) -> Criterion:
    """Returns the criterion of a data set's task."""
    if data.task == "classification":
        return Classification()
    assert data.bytes_per_token is not None, "checked as the data set was built"
    return LanguageModeling(data.bytes_per_token)


def cross_entropy(logits: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
    """In float32 at least: under vmap, autocast leaves the loss in bfloat16."""
    return functional.cross_entropy(logits.to(wide_dtype(logits)), targets, reduction=reduction)


class Evaluator:
    """Computes metrics of replicas on the val and test split.

    Attributes:
        data: on the device of the replicas.
        samples: what samples.npz keeps of each test sample (S, N), by kind of statistics.
    """

    def __init__(
        self, replicas: Replicas, data: Data, criterion: Criterion, recipe: Recipe
    ) -> None:
        self.replicas = replicas
        self.data = data
        self.criterion = criterion
        self.recipe = recipe
        self.samples: dict[str, Tensor] = {}

    def running(self, split: str) -> Columns:
        """Returns the metrics of a split; the replicas must be in evaluation mode."""
        group = self.recipe.mixed_in_evaluation
        return self._score(self.replicas, "running", split, group, group)

    def with_other_statistics(self, splits: Sequence[str]) -> Columns:
        """Returns the metrics of the splits with every other kind of statistics of the recipe."""
        recipe, metrics = self.recipe, Columns()
        if {"precise", "own_share"} & {*recipe.statistics}:
            metrics |= self._with_population(splits)
        for size in recipe.evaluation_batch_sizes:
            copies = with_batch_statistics(self.replicas, size)
            for split in splits:
                metrics |= self._score(copies, f"batch{size}", split, size)
        return metrics

    def _with_population(self, splits: Sequence[str]) -> Columns:
        recipe, metrics, size = self.recipe, Columns(), self.recipe.sizes.norm
        population = with_population(
            self.replicas, self.data, num_samples=recipe.precise_samples, group_size=size
        )
        if population is None:
            logger.info("no precise statistics: the norm has no running averages")
            return metrics
        for split in splits if "precise" in recipe.statistics else ():
            metrics |= self._score(population, "precise", split)
        if "own_share" in recipe.statistics:
            few = gather(population, self.data, "train", torch.arange(2))
            with own_share(population, few, size) as copies:
                if copies is None:
                    logger.info("no own share: it is defined for running mean and variance")
                    return metrics
                for split in splits:
                    metrics |= self._score(copies, "own_share", split, size)
        return metrics

    @torch.no_grad()
    def _score(
        self,
        replicas: Replicas,
        kind: str,
        split: str,
        group_size: int | None = None,
        num_samples: int | None = None,
    ) -> Columns:
        """Returns the metrics of a split with the statistics that the norms use now.

        Args:
            kind: the name of these statistics.
            group_size: samples that share statistics; None if samples do not.
            num_samples: per forward; None: as many as fit.
        """
        loss = torch.zeros((), dtype=torch.float64)  # (S,) from the first block on
        per_sample: list[Tensor] = []  # (S, block) each
        num_targets, count = 0, len(getattr(self.data, split))
        num_samples = num_samples or block_size(replicas, group_size or 1)
        # Samples that share statistics are in random order, and the last block is filled up to
        # whole groups with the first samples, which do not count again: the result must depend
        # neither on the order of the split nor on the number of replicas.
        order = torch.arange(count) if group_size is None else shuffled(self.data, split)
        for indices in order.split(num_samples):

            def measure(output: Tensor, block: Batch, num: int = len(indices)) -> Measurements:
                output, block = output[:num], {name: value[:num] for name, value in block.items()}
                return self.criterion.measure(output, block)

            missing = -len(indices) % min(group_size or 1, count)
            filled = torch.cat([indices, order[:missing]])
            batch = gather(replicas, self.data, split, filled)
            measured = replicas.measure(batch, measure, shared=True)
            loss = loss + measured["loss"].double()
            per_sample.append(measured["per_sample"])
            num_targets += batch["targets"][: len(indices)].numel()
        samples = torch.cat(per_sample, dim=1)
        if split == "test":
            self.samples[kind] = samples.cpu()[:, order.argsort()]
        summary = self.criterion.summarise(split, loss / num_targets, samples)
        suffix = suffix_of(kind)
        return {f"{split}/{name}{suffix}": value.tolist() for name, value in summary.items()}

    def content(self, metrics: Columns, index: int) -> dict[str, dict[str, float]]:
        """Returns evaluation.json of replica `index`: its finite metrics by kind of statistics."""
        content: dict[str, dict[str, float]] = {}
        for name, column in metrics.items():
            metric, _, suffix = name.partition("@")
            kind = "batch" if suffix.startswith("batch") else suffix or "running"
            if kind in self.recipe.statistics and math.isfinite(column[index]):
                content.setdefault(suffix or "running", {})[metric] = column[index]
        return content

    def samples_of(self, metrics: Columns, index: int) -> dict[str, np.ndarray]:
        """Returns samples.npz of replica `index`: kinds whose test loss is finite."""
        return {
            kind: rows[index].numpy()
            for kind, rows in self.samples.items()
            if math.isfinite(metrics["test/loss" + suffix_of(kind)][index])
        }


def suffix_of(kind: str) -> str:
    """Returns the end of the names of metrics with this kind of statistics."""
    return "" if kind == "running" else f"@{kind}"


# --- Samples and copies with other statistics -----------------------------------------------------


def shuffled(data: Data, split: str) -> Tensor:
    """Returns the sample indices of a split (N,) in a random order.

    The order is the same for every run, so that runs are compared on the same batches.
    """
    source = generator(0, "evaluate", SPLITS.index(split))
    return torch.randperm(len(getattr(data, split)), generator=source)


def block_size(replicas: Replicas, group_size: int) -> int:
    """Returns the samples per forward in evaluation, a multiple of `group_size`."""
    is_on_cpu = next(replicas.parameters()).device.type == "cpu"
    total = STACK_SAMPLES if is_on_cpu else 8 * STACK_SAMPLES
    at_once = replicas.num_replicas if replicas.is_stacked else 1
    return max(1, total // at_once // group_size) * group_size


def gather(replicas: Replicas, data: Data, split: str, indices: Tensor) -> Batch:
    """Returns the samples at `indices` (N,) as model inputs; those of `train` are augmented.

    How a sample is augmented depends on its index alone.
    """
    batch = getattr(data, split).gather(indices)
    if split == "train" and data.augmentation is not None:
        draws = data.augmentation.draw(0, 0, len(data.train))[indices.cpu()]
        batch["inputs"] = data.augmentation.apply(batch["inputs"], draws)
    batch["inputs"] = data.model_inputs(batch["inputs"], next(replicas.parameters()).dtype)
    return batch


def with_batch_statistics(replicas: Replicas, group_size: int) -> Replicas:
    """Copies whose norms use the statistics of groups of `group_size` samples.

    Norms are in training mode, all other modules in evaluation mode.
    """
    copies = copied(replicas).eval()
    for _, site in named_sites(copies):
        site.train()
        site.norm_batch_size = group_size
    return copies


@torch.no_grad()
def with_population(
    replicas: Replicas, data: Data, *, num_samples: int, group_size: int
) -> Replicas | None:
    """Copies whose running state is that of many training samples ("precise" statistics).

    Every norm sees groups of `group_size` samples, as in training. With mean m_i and biased
    variance v_i of the n_i values of group i, and w_i = n_i / sum n_i, the population has
    mean = sum w_i m_i and var = sum w_i (v_i + (m_i - mean)^2): the correction n / (n - 1) of
    running variances is undone (arXiv:2105.07576). Torch's own batch norms get these moments of
    what enters them. Norms with other kinds of state pool it by their own `merge_state`, at
    momentum 1, or by its mean.

    Args:
        num_samples: upper limit, 2 or more; taken from a random order of the training split,
            augmented as in training. The last group may be shorter, but a single last sample is
            left out.

    Returns:
        The copies, in evaluation mode; None if no norm has running state that a forward in
        training mode moves, or one moves it at a rate that is not its `momentum`.
    """
    indices = shuffled(data, "train")[:num_samples]
    if len(indices) % group_size == 1 and group_size > 1:
        indices = indices[:-1]
    has_torchs = any(isinstance(module, BATCH) for module in replicas.modules())
    copies = with_batch_statistics(in_turn(replicas) if has_torchs else replicas, group_size)
    trained = {name: module for name, module in copies.named_modules() if module.training}
    norms = {name: norm for name, norm in trained.items() if isinstance(norm, HasMomentum)}
    for norm in norms.values():
        norm.momentum = 1.0
    sites = [site for site in find_sites(copies) if site.has_averages and site.norm.training]
    start, ends, shares = read_state(copies), [], []
    with watching([site for site in sites if isinstance(site.norm, BATCH)]) as seen:
        for block in indices.split(block_size(copies, group_size)):
            write_state(copies, start)  # for norms whose forward uses their running state
            batch = gather(copies, data, "train", block)
            copies.measure(batch, lambda output, _: output.new_zeros(()), shared=True)
            ends.append(read_state(copies))
            shares.append(len(block) / len(indices))
    write_state(copies, merge_state(copies, start, ends, shares))
    for name, norm in norms.items():
        _undo_bessel(norm, start.get(f"{name}.num_values"))
    pooled = {site: [site.pooled(samples) for samples in calls] for site, calls in seen.items()}
    write_populations({site: pool_batches(site, calls) for site, calls in pooled.items() if calls})
    moved = {
        name.rpartition(".")[0]
        for name, value in ends[0].items()
        if value.is_floating_point() and not torch.allclose(value, start[name], equal_nan=True)
    }
    return copies.eval() if moved and moved <= norms.keys() else None


def _undo_bessel(norm: Any, num_before: Tensor | None) -> None:
    """Turns the unbiased variances that shipped norms average into population variances.

    Args:
        num_before: the norm's `num_values` before the population; None if it has none.
    """
    is_unbiased = getattr(norm, "unbiased_running_var", False)
    if is_unbiased and num_before is not None:
        num = (norm.num_values - num_before)[..., None].to(norm.running_var.dtype)
        norm.running_var.mul_(torch.where(num > 1, (num - 1) / num, 1))


def in_turn(replicas: Replicas) -> InTurn:
    """Copies of the networks, not stacked."""
    return InTurn([replicas.replica(index) for index in range(replicas.num_replicas)])


@contextmanager
def own_share(population: Replicas, batch: Batch, group_size: int) -> Iterator[Replicas | None]:
    """Yields copies of replicas in which a sample's own moments weigh as much as in training.

    The norms use the moments expected of a group of `group_size` samples that holds the given one,
    the others being average ones; see `with_moments` (arXiv:1904.06031).

    Args:
        population: as `with_population` returns it.
        batch: a few samples, to test whether the norms can be evaluated so.

    Yields:
        None if a norm that pools samples has no running mean and variance, or other ones.
    """
    copies, can_be = in_turn(population).eval(), False
    with ExitStack() as hooks:
        for network in copies.trees:
            for _, site in named_sites(network):
                site.norm_batch_size = group_size
            sites = [site for site in find_sites(network) if site.pools_samples]
            can_be = can_be or _can_be_shown(network, sites, batch)  # one may have diverged
            moments = {site: [Population(*site.running)] for site in sites if site.has_averages}
            hooks.enter_context(with_moments(moments, own_share=True))
        yield copies if can_be else None


@torch.no_grad()
def _can_be_shown(network: nn.Module, sites: list[NormSite], batch: Batch) -> bool:
    """True if there are sites, and all depend on their running moments as batch norm does."""
    if not sites or not all(site.has_averages for site in sites):
        return False
    with inputs_to(sites) as inputs:
        network(*model_arguments(batch))
    state = read_state(network)
    can_be = all(can_be_shown(s, x) and _is_elementwise(s, x) for s, x in inputs.items())
    write_state(network, state)
    return can_be


def _is_elementwise(site: NormSite, x: Tensor) -> bool:
    """True if its evaluation looks at no other position, as that of EvalNorm does."""
    maps = site.maps(x)  # (N, C, P)
    changed = maps.clone()
    changed[..., 0] += 1
    before, after = (site.maps(site.entry(site.like_input(m, x))) for m in (maps, changed))
    return torch.equal(before[..., 1:], after[..., 1:])
