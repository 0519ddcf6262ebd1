"""How far the running averages of a norm are from what they average: the moments of batches."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from normexp.any_network.diagnosis.result import SiteRow
from normexp.norms.base import Moments
from normexp.norms.moment_sites import MomentSite, averaged_var, pool_batches
from normexp.norms.moment_sites import distances as distances_from

Calls = list[Moments]  # of each call of a site within one forward
INITIAL_SHARE = 0.1  # weight beyond which initial values are a fault


def row_of(site: MomentSite, batches: list[Calls], *, moves: bool) -> SiteRow:
    """The numbers of one site, from its moments in each batch and call.

    Args:
        moves: training moves the averages.
    """
    momentum = getattr(site.norm, "momentum", None)
    share = (1 - momentum) ** site.counter if momentum and site.counter else None
    mean, var = site.running
    if not (mean.isfinite().all() and var.isfinite().all()):
        state = "not finite"
    elif not moves:
        state = "held"
    elif bool(((mean == 0) & (var == 1)).all()):
        state = "never updated"
    elif share and share > INITIAL_SHARE:
        state = "initial"
    else:
        state = "averaged"
    distances = _distances(site, mean, var, batches)
    if not distances.numel():  # one batch has no spread
        distances = torch.zeros(2, 1)
    of_mean, of_var = distances.median(dim=1).values.tolist()
    return SiteRow(
        name=site.name,
        momentum=momentum,
        updates=site.counter,
        initial_share=share,
        mean_distance=of_mean,
        var_distance=of_var,
        largest_distance=float(distances.max()),
        state=state,
    )


def _distances(site: MomentSite, mean: Tensor, var: Tensor, batches: list[Calls]) -> Tensor:
    """How far mean and variance of each channel (2, C) are from those of batches."""
    moments = list(chain.from_iterable(batches))
    scale = pool_batches(site, moments).var + site.eps
    of_mean = distances_from(mean, [of_call.mean for of_call in moments], scale.sqrt())
    of_var = distances_from(var, [averaged_var(of_call) for of_call in moments], scale)
    return torch.stack([of_mean, of_var])
