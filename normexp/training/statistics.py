"""The kinds of statistics that norms may use in evaluation; `evaluate_with` names them.

Kinds: `running` (the norms as they are), `precise` (moments pooled over training samples),
`own_share` (these, in which a sample's own moments weigh as much as in training) and `batch<k>` (of
batches of k samples). All but the first are measured on copies of the replicas, so nothing has to
be changed back. A new kind is a class here, its line in `STATISTICS`, and its name in
`config.keys.Statistic`; its moments may be a `Rule`, as `with_own_share` of norms/moment_sites.py.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normexp.norms.contract import HasMomentum
from normexp.norms.moment_sites import (
    BATCH,
    MomentSite,
    Population,
    Rule,
    can_be_shown,
    find_sites,
    inputs_to,
    pool_batches,
    watching,
    with_moments,
    with_own_share,
    write_populations,
)
from normexp.norms.site import merge_state, named_sites, read_state, write_state
from normexp.training.batching.copies import copied
from normexp.training.batching.replicas import Batch, InTurn, Replicas, model_arguments
from normexp.training.data.dataset import Data
from normexp.training.samples import gather, samples_per_forward, shuffled

logger = logging.getLogger(__name__)


class Variant(NamedTuple):
    """Replicas whose norms use other statistics.

    Attributes:
        kind: the suffix of their metrics.
        group_size: samples that share statistics; None if samples do not.
    """

    kind: str
    replicas: Replicas
    group_size: int | None = None


@dataclass
class Trained:
    """What statistics are taken from: trained replicas, their data, and how they were trained.

    Attributes:
        norm_batch_size: samples that shared statistics in training.
        num_samples: training samples to pool.
        batch_sizes: samples per batch, for batch statistics.
    """

    replicas: Replicas
    data: Data
    norm_batch_size: int
    num_samples: int
    batch_sizes: list[int]

    @cached_property
    def population(self) -> Replicas | None:
        """See `with_population`."""
        population = with_population(
            self.replicas,
            self.data,
            num_samples=self.num_samples,
            group_size=self.norm_batch_size,
        )
        if population is None:
            logger.info("no precise statistics: the norm has no running averages")
        return population


class Statistic(ABC):
    """A kind of statistics besides the running ones.

    Attributes:
        needs_mixing: only a norm that mixes samples has them.
        reads_batch: in evaluation an output then depends on its own sample as in training, or on
            others; refused for a norm that reads later positions of a text in training.
    """

    needs_mixing = False
    reads_batch = False

    @abstractmethod
    def variants(self, trained: Trained) -> Iterator[Variant]:
        """Yields the replicas to evaluate, ready until the next one is asked for."""


class Precise(Statistic):
    """Moments pooled over training samples."""

    def variants(self, trained: Trained) -> Iterator[Variant]:
        if trained.population is not None:
            yield Variant("precise", trained.population)


class OwnShare(Statistic):
    """Pooled moments, in which a sample's own weigh as much as in training."""

    needs_mixing = True
    reads_batch = True

    def variants(self, trained: Trained) -> Iterator[Variant]:
        if trained.population is None:
            return
        size = trained.norm_batch_size
        few = gather(trained.population, trained.data, "train", torch.arange(2))
        with by_rule(with_own_share, trained.population, few, size) as copies:
            if copies is None:
                logger.info(
                    "no own share: it needs norms that pool samples and keep running mean and "
                    "variance"
                )
            else:
                yield Variant("own_share", copies, size)


class OfBatch(Statistic):
    """The statistics of the batch at hand."""

    needs_mixing = True
    reads_batch = True

    def variants(self, trained: Trained) -> Iterator[Variant]:
        for size in trained.batch_sizes:
            yield Variant(f"batch{size}", with_batch_statistics(trained.replicas, size), size)


# In the order in which they are measured.
STATISTICS: dict[str, Statistic] = {
    "precise": Precise(),
    "own_share": OwnShare(),
    "batch": OfBatch(),
}


def with_batch_statistics(replicas: Replicas, group_size: int) -> Replicas:
    """Copies whose norms use the statistics of groups of `group_size` samples.

    Norms are in training mode, all other modules in evaluation mode.
    """
    copies = copied(replicas).eval()
    for _, site in named_sites(copies):
        site.train()
        site.norm_batch_size = group_size
        site.running_from = "step"  # a population is of all groups
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
        for block in indices.split(samples_per_forward(copies, data, group_size)):
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
def by_rule(
    rule: Rule, population: Replicas, batch: Batch, group_size: int
) -> Iterator[Replicas | None]:
    """Yields copies of replicas whose norms use moments by a rule, as `with_own_share`.

    Args:
        population: replicas whose running moments are the population's.
        batch: a few samples, to test whether the norms can be evaluated so.
        group_size: samples that shared statistics in training.

    Yields:
        None if a norm that pools samples has no running mean and variance, or other ones.
    """
    copies, can_be = in_turn(population).eval(), False
    with ExitStack() as hooks:
        for network in copies.trees:
            for _, site in named_sites(network):
                site.norm_batch_size = group_size  # for the rule; nothing is split in evaluation
            sites = [site for site in find_sites(network) if site.pools_samples]
            can_be = can_be or _can_be_shown(network, sites, batch)  # one may have diverged
            moments = {site: [Population(*site.running)] for site in sites if site.has_averages}
            hooks.enter_context(with_moments(moments, rule))
        yield copies if can_be else None


@torch.no_grad()
def _can_be_shown(network: nn.Module, sites: list[MomentSite], batch: Batch) -> bool:
    """True if there are sites, and all depend on their running moments as batch norm does."""
    if not sites or not all(site.has_averages for site in sites):
        return False
    with inputs_to(sites) as inputs:
        network(*model_arguments(batch))
    state = read_state(network)
    can_be = all(can_be_shown(s, x) and _is_elementwise(s, x) for s, x in inputs.items())
    write_state(network, state)
    return can_be


def _is_elementwise(site: MomentSite, x: Tensor) -> bool:
    """True if its evaluation looks at no other position, as that of EvalNorm does."""
    maps = site.maps(x)  # (N, C, P)
    changed = maps.clone()
    changed[..., 0] += 1
    before, after = (site.maps(site.entry(site.like_input(m, x))) for m in (maps, changed))
    return torch.equal(before[..., 1:], after[..., 1:])
