"""Gives any network other norms: finds its norms, tries what is claimed of them, replaces them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from normexp.batching.copies import copied
from normexp.config.compose import compose_config
from normexp.config.keys import Count
from normexp.config.validate import check_value
from normexp.errors import UserError
from normexp.models.anew import keep_reproduced
from normexp.models.recognise import Recognition, recognise
from normexp.models.split import try_split
from normexp.models.surgery import check_called, put_sites
from normexp.models.trial import Inputs
from normexp.norms.build import build_norm
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites
from normexp.words import as_typed


def find_norms(
    network: nn.Module, factory: NormFactory, inputs: Inputs | None
) -> tuple[Recognition, list[str]]:
    """The norms of a network that `factory` can replace, and lines for the log."""
    recognition = recognise(network, inputs)
    if inputs is None or factory.keeps_norms:
        return recognition, []
    return keep_reproduced(network, recognition, inputs)


def copy_with_norms(
    model: nn.Module,
    norm: str,
    inputs: Any,
    norm_batch_size: int | None,
    knobs: Mapping[str, Any],
) -> tuple[nn.Module, Sequence[str]]:
    """See `normexp.replace_norms`. Returns the copy and lines for the log."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserError(f"model is a {kind}, must be an nn.Module, not its class or state_dict")
    factory = _build_factory(norm, norm_batch_size, knobs)
    network = copied(model)
    if not all(parameter.is_leaf for parameter in network.parameters()):
        raise UserError(
            "the model holds TorchScript, whose copies cannot be trained; script it later"
        )
    inputs = None if inputs is None else Inputs.of(inputs)
    sizes: dict[nn.Module, int | None] = {}  # of an earlier call
    for _, site in named_sites(network):
        sizes[site] = site.norm_batch_size
        site.norm_batch_size = site.order = None
    recognition, notes = find_norms(network, factory, inputs)
    notes = [*put_sites(network, factory, recognition).notes(), *notes]
    for _, site in named_sites(network):
        for inner in site.norm.modules():
            sizes.pop(inner, None)  # which the second call has put into a site
    for _, site in named_sites(network):
        site.norm_batch_size = sizes.get(site, site.norm_batch_size)  # of those that stay
    if inputs is not None:
        check_called(network, inputs)
        split = try_split(network, inputs)
        split.install(network)
        notes += split.notes
    return network, notes


def _build_factory(norm: str, norm_batch_size: int | None, knobs: Mapping[str, Any]) -> NormFactory:
    """The factory of a norm, from what a user passes in Python."""
    check_value("norm", norm, str)
    check_value("norm_batch_size", norm_batch_size, Count | None)
    if lacking := knobs.keys() & {"at", "half_life"}:
        raise UserError(
            f"{min(lacking)} needs a training by normexp; drop it, or use normexp.module"
        )
    words = [f"norm={norm}"]
    for key, value in knobs.items():
        words.append(f"{'' if key == 'eps' else 'norm.'}{key}={as_typed(value)}")
    return build_norm(compose_config(words), norm_batch_size, typed=knobs)
