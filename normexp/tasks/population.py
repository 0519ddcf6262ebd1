"""Precise statistics: norms' running state recomputed over many samples with frozen weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normexp.batching.replicas import Batch, Replicas
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.contract import State, named_sites
from normexp.tasks.frozen import batch_statistics, block_size, gather, run, shuffled
from normexp.tasks.gaps import SiteGaps, moment_gaps
from normexp.tasks.pooling import momentum_at_one, undo_bessel

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

    Each site's norm sees groups of `group_size` samples, as in training; only the last group may be
    shorter. With a group's mean m_i and biased variance v_i over n_i values, w_i = n_i / sum n_i:
    mean = sum w_i m_i and var = sum w_i (v_i + (m_i - mean)^2). That is the population variance of
    all values: the correction n / (n - 1) in running variances is undone (arXiv:2105.07576). A norm
    with another kind of state pools it as its own merge_state does, its momentum at 1.

    Args:
        num_samples: the most to use: the first of a random order of the training split, not
            augmented. A lone last sample with one value per channel is left out.

    Returns:
        None where no norm has running state that a training forward at momentum 1 replaces.
    """
    indices = shuffled(data, "train")[:num_samples]
    indices = _without_lone_value(replicas, data, indices, group_size)
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
    replaced = all(torch.allclose(once[n], again[n], equal_nan=True) for n in first)
    return moved if replaced else []


def _without_lone_value(replicas: Replicas, data: Data, indices: Tensor, group_size: int) -> Tensor:
    """`indices` but for a last sample that would be a group of one value per channel."""
    if group_size == 1 or len(indices) % group_size != 1:
        return indices
    if _fewest_values(replicas, gather(replicas, data, "train", indices[-1:])) > 1:
        return indices
    if len(indices) == 1:
        raise UserError("precise_samples=1 leaves one value per channel; try precise_samples=4096")
    logger.info("precise statistics leave out a last sample that would be a group of its own")
    return indices[:-1]


def _fewest_values(replicas: Replicas, batch: Batch) -> int:
    """Values per channel at the site where the samples of `batch` have the fewest."""
    counts: list[int] = []

    def count(site: Any, args: Any, kwargs: dict[str, Any]) -> None:
        x, *rest = args
        mask = rest[0] if rest else kwargs.get("mask")
        axis = 1 if site.view == "map" else -1
        counts.append(x.numel() // x.shape[axis] if mask is None else int(mask.sum()))

    sites = [site for _, site in named_sites(replicas)]
    hooks = [site.register_forward_pre_hook(count, with_kwargs=True) for site in sites]
    try:
        run(replicas, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return min(counts)
