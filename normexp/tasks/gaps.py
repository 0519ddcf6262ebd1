"""How far running averages lie from the moments of the population, at each site."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from normexp.batching.replicas import Replicas
from normexp.norms.state import State

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
