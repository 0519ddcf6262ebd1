"""Puts new norms in place of old ones, with their values and their frozen or shared parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normexp.any_network.description import COUNT, INITIAL_VALUES, NormDescription, tensors_of
from normexp.any_network.formula import TOLERANCE, values_of_norm
from normexp.norms.contract import HasRamp, State
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site


class SiteWithTail(nn.Sequential):
    """A site, then the old norm's dropout and activation under the names that they had."""

    adds_level = "site"


@dataclass
class CarriedOver:
    """What became of the tensors of the old norms.

    Attributes:
        lost: those that training had changed, and that have no place in the new norm.
        frozen: sites, or parameters of them, that require no gradient, as in the old norm.
    """

    lost: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)


class Place(NamedTuple):
    """A parameter or buffer of a module."""

    owner: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        return getattr(self.owner, self.name)


def put_norms(
    network: nn.Module,
    norms: Mapping[str, NormDescription],
    factory_of: Callable[[NormDescription], NormFactory],
) -> CarriedOver:
    """Puts a site with a new norm in place of each of these norms of a network, by path."""
    carried = CarriedOver()
    new: dict[str, nn.Module] = {}
    shared: dict[tuple[int, str], nn.Parameter] = {}  # new parameters by the old one and the role
    for path, norm in norms.items():
        old = network.get_submodule(path)
        build = factory_of(norm).tokens if norm.formula.is_last else factory_of(norm)
        site = build(norm.num_features, **norm.settings).train(old.training)
        site = _like(old, network, site)
        lost = _carry_values(values_of_norm(old, norm), site)
        carried.lost += [f"{path}.{name}" for name in lost]
        if norm.holds_averages and hasattr(site.norm, "track_running_stats"):
            setattr(site.norm, "track_running_stats", False)  # noqa: B010 (typed to hold no bool)
        carried.frozen += [f"{path}{name}" for name in _freeze(old, norm, site)]
        _share(old, norm, site, shared)
        new[path] = _with_tail(site, old, norm)
    put(new, network)
    return carried


def put(new: Mapping[str, nn.Module], network: nn.Module) -> None:
    """Puts modules in place of those at their paths, at every path of a shared one."""
    by_old = {network.get_submodule(path): module for path, module in new.items()}
    for path, old in list(network.named_modules(remove_duplicate=False)):
        if old in by_old:
            network.set_submodule(path, by_old[old])


def _with_tail(site: Site, old: nn.Module, norm: NormDescription) -> nn.Module:
    if not norm.tail:
        return site
    new = SiteWithTail()
    new.add_module("site", site)
    for name in norm.tail:
        new.add_module(name, old.get_submodule(name))
    return new


def _like(old: nn.Module, network: nn.Module, new: Site) -> Site:
    """The new site on the device, and in the precision, of the old norm or else its network."""
    tensors = (*old.parameters(), *old.buffers(), *network.parameters(), torch.ones(()))
    first = next(tensor for tensor in tensors if tensor.is_floating_point())
    return new.to(first.device, first.dtype)


def _places(site: Site, role: str, shape: torch.Size) -> list[Place]:
    """The tensors of a new norm that have the role of one of torch's batch norm, by its name."""
    places: list[Place] = []
    for path, tensor in tensors_of(site.norm).items():
        owner, _, name = path.rpartition(".")
        if name == role and tensor.shape == shape:
            places.append(Place(site.norm.get_submodule(owner), name))
    return places


@torch.no_grad()
def _carry_values(values: State, site: Site) -> list[str]:
    """Copies gain, shift and running moments; returns the names of those that have no place.

    A weight is copied only to one that starts at one, a bias only to one that starts at zero. A
    norm with a warm-up or ramp keeps its own count of batches, which must start at 0.
    """
    lost: list[str] = []
    for name, value in values.items():
        if name == COUNT and isinstance(site.norm, HasRamp):
            continue
        start = INITIAL_VALUES[name]
        if name == "weight" and getattr(site.norm, "zero_centered", False):
            value, start = value - 1, 0
        fitting: list[Tensor] = []
        for place in _places(site, name, value.shape):
            must_be_new = name in ("weight", "bias")
            if not must_be_new or bool((place.tensor == start).all()):
                fitting.append(place.tensor)
        if len(fitting) == 1:
            fitting[0].copy_(value)
        elif name != COUNT and bool(((value - start).abs() > TOLERANCE).any()):
            lost.append(name)
    return lost


def _freeze(old: nn.Module, norm: NormDescription, site: Site) -> list[str]:
    """Freezes what the old norm does not train; returns "" for the site, or names in it."""
    if not any(True for _ in site.parameters()):
        return []
    tensors = tensors_of(old)
    trained = {name for name, tensor in tensors.items() if tensor.requires_grad}
    if norm.roles and trained.isdisjoint(name for names in norm.roles.values() for name in names):
        site.requires_grad_(False)
        return [""]
    frozen: list[str] = []
    for role, names in norm.roles.items():
        if names and trained.isdisjoint(names):
            for place in _places(site, role, torch.Size((norm.num_features,))):
                place.tensor.requires_grad_(False)
                frozen.append(f".{role}")
    return frozen


def _share(
    old: nn.Module,
    norm: NormDescription,
    site: Site,
    shared: dict[tuple[int, str], nn.Parameter],
) -> None:
    """Gives the site those parameters that stand for one that the old norm shares with others."""
    tensors = tensors_of(old)
    for role, names in norm.roles.items():
        places = _places(site, role, torch.Size((norm.num_features,)))
        if len(names) != 1 or len(places) != 1:
            continue
        (place,) = places
        if isinstance(place.tensor, nn.Parameter):
            parameter = shared.setdefault((id(tensors[names[0]]), role), place.tensor)
            setattr(place.owner, place.name, parameter)
