"""Recomputes running averages with the weights as they are, for norms of any class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normexp.any_network.diagnosis.batches import call_of, first_samples, stream_batches
from normexp.any_network.diagnosis.parts import Modes, Parts, is_within, set_modes
from normexp.any_network.diagnosis.result import ROOT
from normexp.any_network.trial import differing_values
from normexp.errors import UserError
from normexp.norms.base import Moments
from normexp.norms.moment_sites import (
    MomentSite,
    Population,
    pool_batches,
    watching,
    write_populations,
)
from normexp.training.batching.copies import copied
from normexp.training.batching.draws import keeping_random_state
from normexp.words import name_some


def recompute_averages(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    max_batches: int | None = None,
) -> tuple[str, ...]:
    """See `normexp.recompute_averages`."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model={model!r}: must be an nn.Module, as normexp.load(...) returns")
    model = getattr(model, "_orig_mod", model)  # inside torch.compile
    stream = islice(stream_batches(batches, model), max_batches)
    start = [*islice(stream, 2)]
    if not start:
        raise UserError("batches holds 0; a generator can be read only once")
    with keeping_random_state(model):
        parts = Parts(model, first_samples(start), _no_loss)
        active = parts.sites()
        unknown = parts.unknown(active)
        if not active and not unknown:
            raise UserError("the model has no norm with averages that training moves")
        moments, other_state = run_in_training(parts, active, unknown, chain(start, stream))
    populations = _pooled(model, parts, active, moments)
    write_values(model, other_state)
    with torch.no_grad():
        write_populations(populations)
    return tuple(path or ROOT for path in (*active, *unknown))


class Recomputed(NamedTuple):
    """What one pass over batches gives.

    Attributes:
        moments: of each site in each batch and call.
        other_state: values, by path, of all state that these forwards moved in these modules.
    """

    moments: dict[str, list[Moments]]
    other_state: dict[str, Any]


def run_in_training(
    parts: Parts,
    active: Mapping[str, MomentSite],
    unknown: Mapping[str, Collection[str]],
    batches: Iterable[Any],
) -> Recomputed:
    """Runs a copy with these norms in training mode, and all else in evaluation mode."""
    norms = {path for path in parts.modules if is_within(path, *active)}
    in_training = parts.training.training & norms.union(*unknown.values())
    model, sites = copied((parts.model, dict(active)), parts.fixed)
    set_modes(model, Modes(in_training, learning=True))
    modules = dict(model.named_modules())
    owners = [*unknown, *(parts.paths[site.norm] for site in active.values())]
    counting: list[Any] = [m for m in map(modules.get, owners) if _counts_batches(m)]
    momenta = [module.momentum for module in counting]
    moments: dict[str, list[Moments]] = {path: [] for path in active}
    for step, batch in enumerate(batches, 1):
        for module in counting:
            module.momentum = 1 / step  # all batches weigh alike
        args, kwargs = call_of(model, batch)
        with torch.enable_grad(), watching([*sites.values()]) as samples:
            model(*args, **kwargs)
        for path, site in sites.items():
            moments[path] += [site.pooled(call) for call in samples[site]]
    for module, momentum in zip(counting, momenta, strict=True):
        module.momentum = momentum
    state = {}
    for path in differing_values(model, parts.model):
        owner, _, name = path.rpartition(".")
        if owner in owners:
            state[path] = copied(getattr(modules[owner], name))
    return Recomputed(moments, state)


def _counts_batches(module: Any) -> bool:
    """True if a module can average all batches alike, as batch norms can."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return (
        not is_scripted and hasattr(module, "num_batches_tracked") and hasattr(module, "momentum")
    )


@torch.no_grad()
def write_values(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Writes values by path, into tensors in place."""
    modules = dict(model.named_modules())
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        module = modules[owner]
        old = getattr(module, name)
        if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
            old.copy_(value)
        else:
            setattr(module, name, value)


def _pooled(
    model: nn.Module,
    parts: Parts,
    active: Mapping[str, MomentSite],
    moments: Mapping[str, list[Moments]],
) -> dict[MomentSite, Population]:
    """The moments of all samples, by the sites of the model itself.

    Raises:
        UserError: they are not finite.
    """
    modules = dict(model.named_modules())
    pooled = {
        replace(site, norm=modules[parts.paths[site.norm]]): pool_batches(site, moments[path])
        for path, site in active.items()
        if moments[path]
    }
    bad = [s.name for s, (mean, var) in pooled.items() if not (mean + var).isfinite().all()]
    if bad:
        raise UserError(
            f"what reaches {name_some(bad)} is not finite, so its averages stay as they were; "
            "look for the first batch with NaN or infinity"
        )
    return pooled


def _no_loss(*_: Any) -> Tensor:
    return torch.zeros(())
