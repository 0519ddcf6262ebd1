"""Precise statistics: norms' running state recomputed over many samples with frozen weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from normexp.batching.replicas import Batch, Replicas
from normexp.data.dataset import Data
from normexp.norms.contract import named_sites
from normexp.norms.state import State
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
