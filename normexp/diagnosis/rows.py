"""How far the running averages of a norm are from what they average: the moments of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from normexp.diagnosis.result import SiteRow
from normexp.norms.base import Moments
from normexp.norms.moment_sites import NormSite, averaged_var, distances, pool_batches

Calls = list[Moments]  # of each call of a site within one forward
INITIAL_SHARE = 0.1  # weight beyond which initial values are a fault
FEW = 16  # batches


def row_of(site: NormSite, batches: list[Calls]) -> SiteRow:
    """The numbers of one site, from its moments in each batch and call."""
    momentum = getattr(site.norm, "momentum", None)
    every = [moments for calls in batches for moments in calls]
    mean, var = site.running
    of_mean, of_var = _distances(site, mean, var, every)
    share = (1 - momentum) ** site.counter if momentum and site.counter else None
    state: Literal["averaged", "initial", "never updated"] = "averaged"
    if bool(((mean == 0) & (var == 1)).all()):
        state = "never updated"
    elif share and share > INITIAL_SHARE:
        state = "initial"
    return SiteRow(
        name=site.name,
        momentum=momentum,
        updates=site.counter,
        initial_share=share,
        mean_distance=_middle(of_mean),
        var_distance=_middle(of_var),
        largest_distance=max((float(d.max()) for d in (of_mean, of_var) if len(d)), default=0.0),
        state=state,
    )


def _distances(
    site: NormSite, mean: Tensor, var: Tensor, moments: list[Moments]
) -> tuple[Tensor, Tensor]:
    """How far mean and variance of each channel are from those of batches."""
    scale = pool_batches(site, moments).var + site.eps
    return (
        distances(mean, [part.mean for part in moments], scale.sqrt()),
        distances(var, [averaged_var(part) for part in moments], scale),
    )


def _middle(values: Tensor) -> float | None:
    return float(values.median()) if len(values) else None


def of_single_batches(moments: Mapping[NormSite, list[Calls]]) -> tuple[float, float]:
    """The median and the largest distance of a single batch from all, in standard deviations."""
    apart: list[Tensor] = []
    for site, batches in moments.items():
        every = [moments for calls in batches for moments in calls]
        for one in every[:FEW]:
            apart += _distances(site, one.mean, averaged_var(one), every)
    values = torch.cat(apart)
    return float(values.median()), float(values.max())
