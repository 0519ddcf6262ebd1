"""Statistics to evaluate norms with besides their running ones: of batches, of a population.

Everything here that changes a network is a context manager that changes it back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normexp.batching.draws import generator
from normexp.batching.replicas import Batch, InTurn, Replicas, model_arguments
from normexp.data.dataset import Data
from normexp.norms.contract import DeclaresVariance, HasMomentum, State
from normexp.norms.moment_sites import (
    BATCH,
    NormSite,
    can_be_shown,
    find_sites,
    inputs_to,
    with_moments,
)
from normexp.norms.moment_sites import Population as SiteMoments
from normexp.norms.moments import Moments, pool
from normexp.norms.site import named_sites
from normexp.norms.state import install_state, merge_state, read_state, write_state

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
STACK_SAMPLES = 512  # per forward in evaluation, over all replicas; eight times that on a GPU


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
    return max(1, total // replicas.num_replicas // group_size) * group_size


def gather(replicas: Replicas, data: Data, split: str, indices: Tensor) -> Batch:
    """Returns the samples at `indices` (N,) as model inputs, without augmentation."""
    batch = getattr(data, split).gather(indices)
    batch["inputs"] = data.model_inputs(batch["inputs"], next(replicas.parameters()).dtype)
    return batch


@contextmanager
def evaluation_mode(replicas: Replicas) -> Iterator[None]:
    """Puts replicas into evaluation mode inside the block; restores modes and buffers after it."""
    modes = {module: module.training for module in replicas.modules()}
    buffers, values = dict(replicas.named_buffers()), read_state(replicas)
    replicas.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        install_state(replicas, buffers)  # a norm may have replaced the tensors themselves
        write_state(replicas, values)


@contextmanager
def batch_statistics(replicas: Replicas, group_size: int) -> Iterator[None]:
    """Inside the block, norms use the statistics of groups of `group_size` samples.

    Norms are in training mode, all other modules in evaluation mode.
    """
    sites = [site for _, site in named_sites(replicas)]
    sizes = [site.norm_batch_size for site in sites]
    with evaluation_mode(replicas):
        try:
            for site in sites:
                site.train()
                site.norm_batch_size = group_size
            yield
        finally:
            for site, size in zip(sites, sizes, strict=True):
                site.norm_batch_size = size


@contextmanager
def own_share(replicas: Replicas, batch: Batch, group_size: int) -> Iterator[InTurn | None]:
    """Yields copies of replicas in which a sample's own moments weigh as much as in training.

    The norms use the moments expected of a group of `group_size` samples that holds the given one,
    the others being average ones; see `with_moments` (arXiv:1904.06031).

    Args:
        replicas: in evaluation mode; their running state holds the moments of a population.
        batch: a few samples, to test whether the norms can be evaluated so.

    Yields:
        None if a norm that pools samples has no running mean and variance, or other ones.
    """
    copies = InTurn([replicas.replica(index) for index in range(replicas.num_replicas)])
    copies.eval()
    with ExitStack() as hooks:
        for network in copies.trees:
            for _, site in named_sites(network):
                site.norm_batch_size = group_size
            sites = [site for site in find_sites(network) if site.pools_samples]
            if not _can_be_shown(network, sites, batch):
                yield None
                return
            hooks.enter_context(
                with_moments({s: [SiteMoments(*s.running)] for s in sites}, own_share=True)
            )
        yield copies


@torch.no_grad()
def _can_be_shown(network: nn.Module, sites: list[NormSite], batch: Batch) -> bool:
    """True if there are sites, and all depend on their running moments as batch norm does."""
    if not sites or not all(site.has_averages for site in sites):
        return False
    with inputs_to(sites) as inputs:
        network(*model_arguments(batch))
    state = read_state(network)
    try:
        return all(can_be_shown(s, x) and _is_elementwise(s, x) for s, x in inputs.items())
    finally:
        write_state(network, state)


def _is_elementwise(site: NormSite, x: Tensor) -> bool:
    """True if its evaluation looks at no other position, as that of EvalNorm does."""
    maps = site.maps(x)  # (N, C, P)
    changed = maps.clone()
    changed[..., 0] += 1
    before, after = (site.maps(site.entry(site.like_input(m, x))) for m in (maps, changed))
    return torch.equal(before[..., 1:], after[..., 1:])


SiteGaps = dict[str, dict[str, dict[str, float]]]  # mean and max of two numbers, by site


@dataclass(frozen=True)
class Population:
    """Running state computed from `num_samples` samples ("precise" statistics).

    Attributes:
        state: buffers of the replicas.
        gaps: for each replica, how far the running averages of training are from `state`.
    """

    state: State
    num_samples: int
    gaps: list[SiteGaps]


@torch.no_grad()
def measure_population(
    replicas: Replicas, data: Data, *, num_samples: int, group_size: int
) -> Population | None:
    """Pools the moments of training samples over many forwards in training mode.

    Every norm sees groups of `group_size` samples, as in training. With mean m_i and biased
    variance v_i of the n_i values of group i, and w_i = n_i / sum n_i, the population has
    mean = sum w_i m_i and var = sum w_i (v_i + (m_i - mean)^2): the correction n / (n - 1) of
    running variances is undone (arXiv:2105.07576). Torch's own batch norms get these moments of
    what enters them. Norms with other kinds of state pool it by their own `merge_state`, at
    momentum 1, or by its mean.

    Args:
        num_samples: upper limit, 2 or more; taken from a random order of the training split,
            without augmentation. The last group may be shorter, but a single last sample is
            left out.

    Returns:
        None if no norm has running state that a training forward at momentum 1 replaces.
    """
    indices = shuffled(data, "train")[:num_samples]
    if len(indices) % group_size == 1 and group_size > 1:
        indices = indices[:-1]
        logger.info(
            "precise statistics leave out the last sample, which would be alone in its group"
        )
    with batch_statistics(replicas, group_size), _momentum_of_one(replicas):
        moved = _replaced_buffers(replicas, gather(replicas, data, "train", indices[:group_size]))
        if not moved:
            return None
        start, ends, shares, entered = read_state(replicas), [], [], []
        for block in indices.split(block_size(replicas, group_size)):
            write_state(replicas, start)  # for norms whose forward uses their running state
            entered.append(_forward(replicas, gather(replicas, data, "train", block)))
            ends.append(read_state(replicas))
            shares.append(len(block) / len(indices))
        write_state(replicas, merge_state(replicas, start, ends, shares))
        _undo_bessel(replicas)
        write_state(replicas, _pooled(replicas, entered))
        after = read_state(replicas)
        state = {name: after[name] for name in moved}
    return Population(state, len(indices), moment_gaps(replicas, state))


Entered = dict[str, Moments]  # (S, C) each, by the name of a norm within its network


def _forward(replicas: Replicas, batch: Batch) -> Entered:
    """Runs a forward for its effect on the buffers; returns what entered torch's batch norms."""
    inputs: dict[str, list[Tensor]] = {}
    counts: dict[str, int] = {}

    def keep(_: nn.Module, args: tuple[Tensor, ...], name: str) -> None:
        inputs.setdefault(name, []).append(args[0])

    def moments(output: Tensor, _: Batch) -> dict[str, Tensor]:
        found = {"": output.new_zeros(())}
        for name, calls in inputs.items():
            values = torch.cat([x.transpose(0, 1).flatten(1) for x in calls], dim=1).double()
            counts[name] = values.shape[1]
            found[f"{name}.mean"] = values.mean(dim=1)
            found[f"{name}.var"] = values.var(dim=1, correction=0)
        inputs.clear()  # of this replica
        return found

    with ExitStack() as hooks:
        for tree in replicas.trees:
            for name, norm in _torch_norms(tree):
                handle = norm.register_forward_pre_hook(partial(keep, name=name))
                hooks.callback(handle.remove)
        found = replicas.measure(batch, moments, shared=True)
    return {
        name: Moments(found[f"{name}.mean"], found[f"{name}.var"], count)
        for name, count in counts.items()
    }


def _torch_norms(tree: nn.Module) -> Iterator[tuple[str, Any]]:
    """Torch's batch norms with running averages that sites hold; one that they share once."""
    inside = {module for _, site in named_sites(tree) for module in site.modules()}
    for name, module in tree.named_modules():
        if module in inside and isinstance(module, BATCH) and module.running_mean is not None:
            yield name, module


def _pooled(replicas: Replicas, entered: list[Entered]) -> State:
    """The buffers of torch's batch norms over all forwards."""
    state: State = {}
    for name in entered[0]:
        means, variances = (torch.stack([e[name][i] for e in entered]) for i in (0, 1))
        counts = torch.tensor([float(e[name].count) for e in entered], device=means.device)
        mean, var, _ = pool(Moments(means, variances, counts.double().view(-1, 1, 1)), dim=0)
        for index in range(len(replicas.trees)):
            rows = slice(None) if replicas.is_stacked else index
            prefix = f"trees.{index}.{name}.running_"
            state |= {f"{prefix}mean": mean[0, rows], f"{prefix}var": var[0, rows]}
    return state


def _replaced_buffers(replicas: Replicas, batch: Batch) -> list[str]:
    """Returns the names of the running state: floating-point buffers that a training forward moves.

    Empty if a forward does not fully replace that state, as with a momentum of the opposite
    meaning. This is tested at the first site with state, whose input does not depend on any
    running state: two forwards from different states must end in the same one.
    """
    start = read_state(replicas)
    _forward(replicas, batch)
    once = read_state(replicas)
    floats = [name for name, value in once.items() if value.is_floating_point()]
    moved = [name for name in floats if not torch.equal(once[name], start[name])]
    sites = (name for name, _ in named_sites(replicas))
    below = ([n for n in moved if n.startswith(f"{site}.")] for site in sites)
    first = next((names for names in below if names), [])
    write_state(replicas, {**start, **{name: start[name] + 1 for name in first}})
    _forward(replicas, batch)
    again = read_state(replicas)
    write_state(replicas, start)
    for name in first:
        updated = once[name] != start[name]  # a padded position gets no new value
        if not torch.allclose(once[name][updated], again[name][updated], equal_nan=True):
            return []
    return moved


@contextmanager
def _momentum_of_one(replicas: Replicas) -> Iterator[None]:
    """Inside the block a forward replaces running averages."""
    norms = [norm for norm in _norms(replicas) if isinstance(norm, HasMomentum)]
    before = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 1.0
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def _norms(network: nn.Module) -> list[Any]:
    """The modules inside sites; one that several sites share occurs once."""
    inside = (module for _, site in named_sites(network) for module in site.modules())
    return list(dict.fromkeys(inside))


def _undo_bessel(replicas: Replicas) -> None:
    """Turns the unbiased variances that shipped norms average into population variances."""
    for norm in _norms(replicas):
        names = {name for name, _ in norm.named_buffers(recurse=False)}
        if {"running_mean", "running_var", "num_values"} <= names and not _averages_biased(norm):
            num = norm.num_values[..., None].to(norm.running_var.dtype)
            norm.running_var.mul_(torch.where(num > 1, (num - 1) / num, 1))


def _averages_biased(norm: nn.Module) -> bool:
    return isinstance(norm, DeclaresVariance) and not norm.unbiased_running_var


def moment_gaps(replicas: Replicas, population: State) -> list[SiteGaps]:
    """Compares the current running averages of each replica and site with a population's moments.

    Mean and maximum over channels, without those of zero variance:
        mean_shift       |running_mean - mean| / sqrt(var)
        log2_var_ratio   log2(running_var / var); "max" is the value with the largest magnitude
    Sites without running_mean and running_var are absent.
    """
    whole = read_state(replicas)
    gaps_of_replicas: list[SiteGaps] = []
    for index in range(replicas.num_replicas):
        running, moments = replicas.state_of(index, whole), replicas.state_of(index, population)
        gaps: SiteGaps = {}
        for owner in (name.removesuffix(".running_mean") for name in moments):
            names = (f"{owner}.running_mean", f"{owner}.running_var")
            if all(name in moments for name in names):
                gap = _gap(*(running[name] for name in names), *(moments[name] for name in names))
                if gap is not None:
                    gaps[re.sub(r"(\.norm)+$", "", owner)] = gap  # the name of the site
        gaps_of_replicas.append(gaps)
    return gaps_of_replicas


def _gap(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor
) -> dict[str, dict[str, float]] | None:
    shift = (running_mean - mean).abs() / var.sqrt()
    ratio = torch.log2(running_var / var)
    finite = shift.isfinite() & ratio.isfinite()  # False for constant channels
    if not finite.any():
        return None
    shift, ratio = shift[finite], ratio[finite]
    largest = ratio[ratio.abs().argmax()]
    return {
        "mean_shift": {"mean": shift.mean().item(), "max": shift.max().item()},
        "log2_var_ratio": {"mean": ratio.mean().item(), "max": largest.item()},
    }
