"""Gives any network other norms: finds its norms, tries what is claimed of them, replaces them."""

from __future__ import annotations

from typing import Any

from torch import nn

from normexp.any_network.anew import keep_reproduced
from normexp.any_network.recognise import Recognition, recognise
from normexp.any_network.split import try_split
from normexp.any_network.surgery import check_called, put_sites, stop_splitting
from normexp.any_network.trial import Inputs
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.training.batching.copies import copied


def replace_norms(
    model: nn.Module, factory: NormFactory, inputs: Any = None
) -> tuple[nn.Module, list[str]]:
    """A copy of a network with the norms of a factory, and lines for the log.

    Args:
        model, inputs: see `normexp.replace_norms`.

    Raises:
        UserError: no norm is recognised, or a forward fails with the new norms.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserError(f"model is a {kind}, must be an nn.Module, not its class or state_dict")
    network = copied(model)
    if not all(parameter.is_leaf for parameter in network.parameters()):
        raise UserError(
            "the model holds TorchScript, whose copies cannot be trained; script it later"
        )
    inputs = None if inputs is None else Inputs.of(inputs)
    recognition, notes = find_norms(network, factory, inputs)
    surgery = put_sites(network, factory, recognition)
    notes = [*surgery.notes(), *notes]
    if inputs is not None:
        check_called(network, inputs)
        split = try_split(network, inputs)
        split.install(network)
        notes += split.notes
    return network, notes


def find_norms(
    network: nn.Module, factory: NormFactory, inputs: Inputs | None
) -> tuple[Recognition, list[str]]:
    """The norms of a network that `factory` can replace, and lines for the log."""
    network = copied(network)
    stop_splitting(network)  # where norms were replaced before, see what these norms compute
    recognition = recognise(network, inputs)
    if inputs is None or factory.keeps_norms:
        return recognition, []
    return keep_reproduced(network, recognition, inputs)
