"""How far the running averages of a norm are from what they average: the moments of batches."""

from __future__ import annotations

from collections.abc import Mapping

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
    share = (1 - momentum) ** site.counter if momentum and site.counter else None
    mean, var = site.running
    state = "averaged"
    if momentum == 0:
        state = "momentum 0"
    elif bool(((mean == 0) & (var == 1)).all()):
        state = "never updated"
    elif share and share > INITIAL_SHARE:
        state = "initial"
    elif max(map(len, batches)) > 1:
        state = "used twice"
    apart = _distances(site, mean, var, batches)
    if not apart.numel():  # of one batch alone
        apart = torch.zeros(2, 1)
    of_mean, of_var = apart.median(dim=1).values.tolist()
    return SiteRow(
        name=site.name,
        momentum=momentum,
        updates=site.counter,
        initial_share=share,
        mean_distance=of_mean,
        var_distance=of_var,
        largest_distance=float(apart.max()),
        state=state,
    )


def _distances(site: NormSite, mean: Tensor, var: Tensor, batches: list[Calls]) -> Tensor:
    """How far mean and variance of each channel (2, C) are from those of batches."""
    moments = [part for calls in batches for part in calls]
    scale = pool_batches(site, moments).var + site.eps
    of_mean = distances(mean, [part.mean for part in moments], scale.sqrt())
    of_var = distances(var, [averaged_var(part) for part in moments], scale)
    return torch.stack([of_mean, of_var])


def of_single_batches(moments: Mapping[NormSite, list[Calls]]) -> tuple[float, float]:
    """The median and the largest distance of a single batch from all, in standard deviations."""
    apart = []
    for site, batches in moments.items():
        for calls in batches[:FEW]:
            apart += [_distances(site, one.mean, averaged_var(one), batches) for one in calls]
    values = torch.cat(apart, dim=1)
    return float(values.median()), float(values.max())
