"""Gives any network other norms: finds its norms, tries what is claimed of them, replaces them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from normexp.batching.copies import copied
from normexp.errors import UserError
from normexp.models.anew import keep_reproduced
from normexp.models.recognise import Recognition, recognise
from normexp.models.split import try_split
from normexp.models.surgery import check_called, replace_norms
from normexp.models.trial import Inputs
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites


def find_norms(
    network: nn.Module, factory: NormFactory, inputs: Inputs | None
) -> tuple[Recognition, list[str]]:
    """The norms of a network that `factory` can replace, and lines for the log."""
    recognition = recognise(network, inputs)
    if inputs is None or factory.keeps_norms:
        return recognition, []
    return keep_reproduced(network, recognition, inputs)


def replaced(
    model: nn.Module, factory: NormFactory, inputs: Inputs | None
) -> tuple[nn.Module, Sequence[str]]:
    """See `normexp.replace_norms`. Returns the copy and lines for the log."""
    network = copied(model)
    if not all(parameter.is_leaf for parameter in network.parameters()):
        raise UserError(
            "the model holds TorchScript, whose copies cannot be trained; script it later"
        )
    sizes: dict[nn.Module, int | None] = {}  # of an earlier call
    for _, site in named_sites(network):
        sizes[site] = site.norm_batch_size
        site.norm_batch_size = site.order = None
    recognition, notes = find_norms(network, factory, inputs)
    notes = [*replace_norms(network, factory, recognition).notes(), *notes]
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
