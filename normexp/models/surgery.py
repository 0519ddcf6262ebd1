"""Puts sites in place of the norms of a network that was built without a norm factory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normexp.batching.copies import copied
from normexp.errors import UserError
from normexp.models.formula import EQUALS, DescribedNorm, Norm, Values, is_close
from normexp.models.recognise import (
    COUNT,
    STARTS,
    Left,
    Recognition,
    run_network,
    values_of,
)
from normexp.norms.contract import HasRamp
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site, named_sites
from normexp.words import name_some

FLOAT_EQUALS = 1e-3  # of the outputs, of a network that runs in float32 alone


class SiteWithTail(nn.Sequential):
    """A site, then the old norm's dropout and activation, under the names that they had."""

    adds_level = "site"


@dataclass
class Surgery:
    """The record of what was replaced in a network.

    Attributes:
        classes: the class of the old norm, by site.
        left: what may be norms but was left alone, by path.
        lost: old tensors that training had changed, and that have no place in the new norm.
        keeps_norms: the old norms are inside of the sites.
    """

    left: Mapping[str, Left]
    keeps_norms: bool
    classes: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def notes(self) -> Iterator[str]:
        """Yields the lines of the log."""
        counts = Counter(self.classes.values()).items()
        classes = ", ".join(f"{number} {name}" for name, number in counts)
        place = "around" if self.keeps_norms else "in place of"
        if self.classes:
            yield f"{len(self.classes)} sites {place} {classes}: {name_some(self.classes)}"
        if left := describe_left(self.left):
            yield f"left alone: {left}"
        if self.lost:
            yield f"the new norm has no place for {name_some(self.lost)}"


def describe_left(left: Mapping[str, Left]) -> str:
    """`1 FilmNorm (it is called with a second input)`, of what resembles a norm."""
    counts = Counter((one.class_name, one.reason) for one in left.values() if one.resembles)
    return ", ".join(f"{number} {name} ({why})" for (name, why), number in counts.items())


def replace_norms(
    network: nn.Module,
    factory: NormFactory,
    recognition: Recognition,
    only: Sequence[str] | None = None,
) -> Surgery:
    """Puts a site in place of every norm of `network`, in the layout of the old norm.

    Submodules keep their names and order. A norm that is used in several places becomes one site.
    Eps, momentum and affine of the old norm go to the factory; its gain, shift and running
    moments go to the new norm where that has a tensor of the same role and shape. A factory that
    keeps norms gets sites around them, and around what was left alone and is called like a norm.

    Args:
        only: names of the classes to replace; None for all norms.

    Raises:
        UserError: no norm, or no norm of a class in `only`.
    """
    modules = dict(network.named_modules())
    classes = {path: type(module).__name__ for path, module in modules.items()}
    chosen = {p for p, name in classes.items() if only is None or name in only}
    norms = {p: norm for p, norm in recognition.norms.items() if p in chosen}
    kept = set[str]()
    if factory.keeps_norms:
        kept = {p for p, one in recognition.left.items() if one.resembles and one.is_called}
        kept &= chosen
    found = {classes[p] for p in norms.keys() | kept}
    if not found or set(only or ()) - found:
        raise UserError(_why_nothing(network, recognition, found, only))
    left = {p: one for p, one in recognition.left.items() if p not in kept}
    surgery = Surgery(left if only is None else {}, factory.keeps_norms)
    new: dict[str, nn.Module] = {}
    for path in [path for path in modules if path in norms or path in kept]:
        old, norm = modules[path], norms.get(path)
        surgery.classes[path] = classes[path]
        if factory.keeps_norms:
            new[path] = factory.around(old, is_last=norm is not None and norm.formula.is_last)
        elif norm is not None:
            site, lost = _site_for(old, norm, factory)
            new[path] = _with_tail(_like(old, network, site), old, norm)
            surgery.lost += [f"{path}.{role}" for role in lost]
    _put(new, network)
    for module in network.modules():
        if hasattr(module, "inplace"):  # a norm may need its output for its gradient
            setattr(module, "inplace", False)  # noqa: B010 (nn.Module is typed to hold no bool)
        if isinstance(module, nn.TransformerEncoderLayer) and not factory.keeps_norms:
            module.activation_relu_or_gelu = 0  # else its fast path reads the weights of LayerNorm
    return surgery


def check_formulas(
    network: nn.Module,
    recognition: Recognition,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> None:
    """Puts the formulas that were recognised in place of the norms that are not torch's own.

    Raises:
        UserError: the outputs are not the same, in either mode.
    """
    measured = {path: norm for path, norm in recognition.norms.items() if norm.call is not None}
    if not measured:
        return
    described, twins = copied(network), dict[str, nn.Module]()
    for path, norm in measured.items():
        old = network.get_submodule(path)
        twins[path] = _like(old, network, DescribedNorm(norm, values_of(old, norm), old))
    _put(twins, described)
    for training in (False, True):
        pair = (copied(one).train(training) for one in (network, described))
        expected, out = (_outputs(one, args, keywords) for one in pair)
        tolerance = EQUALS if out.dtype == torch.double else FLOAT_EQUALS
        if expected.shape != out.shape or not is_close(expected, out, tolerance):
            mode = "training" if training else "evaluation"
            raise UserError(
                f"with its own norms put in anew the network has other outputs in {mode}, so what "
                "it does with them is not known well enough to replace them; use norm=as_built"
            )


def check_called(network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Runs a network in both modes. Raises UserError if that fails, or enters not every site."""
    network = copied(network)
    entered: list[str] = []
    sites = dict(named_sites(network))
    for name, site in sites.items():
        site.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
        site.register_forward_hook(lambda *_: entered.append(""))
    for training in (True, False):
        try:
            run_network(network.train(training), args, keywords)
        except UserError as error:
            where = f"norm at {entered[-1]}: " if entered and entered[-1] else ""
            raise UserError(f"{where}{error}") from error
    if idle := sorted(sites.keys() - set(entered)):
        raise UserError(f"the new norm at {name_some(idle)} is never called; use norm=as_built")


def _outputs(network: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor:
    """All floating-point outputs in a row, in float64 if the network takes it."""

    def widen(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_real else value

    wide_args, wide_keywords = tree_map(widen, (args, dict(keywords)))
    try:
        output = run_network(copied(network).double(), wide_args, wide_keywords)
    except UserError:
        output = run_network(network, args, keywords)
    values = [v for v in tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]
    return torch.cat([value.flatten() for value in values])


def _site_for(old: nn.Module, norm: Norm, factory: NormFactory) -> tuple[Site, list[str]]:
    """A site with a new norm, and the roles of old tensors that have no place there."""
    build = factory.tokens if norm.formula.is_last else factory
    site = build(norm.num_features, **norm.settings).train(old.training)
    return site, _carry_over(values_of(old, norm), site)


def _like(old: nn.Module, network: nn.Module, new: nn.Module) -> nn.Module:
    """The new module on the device, and in the precision, of the old one or else its network."""
    tensors = (*old.parameters(), *old.buffers(), *network.parameters(), torch.ones(()))
    first = next(tensor for tensor in tensors if tensor.is_floating_point())
    return new.to(first.device, first.dtype)


def _with_tail(site: nn.Module, old: nn.Module, norm: Norm) -> nn.Module:
    if not norm.tail:
        return site
    new = SiteWithTail()
    new.add_module("site", site)
    for name in norm.tail:
        new.add_module(name, old.get_submodule(name))
    return new


def _put(new: Mapping[str, nn.Module], network: nn.Module) -> None:
    """Puts modules in place of those at their paths, wherever else these stand too."""
    by_old = {network.get_submodule(path): module for path, module in new.items()}
    for path, old in list(network.named_modules(remove_duplicate=False)):
        if old in by_old:
            network.set_submodule(path, by_old[old])


def _why_nothing(
    network: nn.Module,
    recognition: Recognition,
    found: set[str],
    only: Sequence[str] | None,
) -> str:
    leaves = Counter(type(m).__name__ for m in network.modules() if not any(m.children()))
    has = ", ".join(f"{count} {name}" for name, count in leaves.most_common(8))
    for name in sorted(set(only or ()) - found):
        reasons = [one.reason for one in recognition.left.values() if one.class_name == name]
        if reasons:
            return f"model.replace=[{name}]: {reasons[0]}"
        return f"model.replace: the network has no {name}; it has {has}"
    left = describe_left(recognition.left)
    why = f"; left alone: {left}" if left else ""
    return (
        f"the network has no norm that is recognised (it has {has}{why}); build its norms from an "
        "argument `norm`"
    )


@torch.no_grad()
def _carry_over(old: Values, site: Site) -> list[str]:
    """Copies gain, shift and running moments; returns the roles of those that have no place.

    A weight is copied only to one that starts at one, a bias only to one that starts at zero. A
    norm with a warm-up or ramp keeps its own count of batches, which must start at 0.
    """
    tensors = {**dict(site.norm.named_parameters()), **dict(site.norm.named_buffers())}
    if isinstance(site.norm, HasRamp):
        tensors.pop(COUNT, None)
    lost = []
    for role, value in old.items():
        start = STARTS[role]
        fitting = [
            tensor
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] == role
            and tensor.shape == value.shape
            and (role not in ("weight", "bias") or bool((tensor == start).all()))
        ]
        if len(fitting) == 1:
            fitting[0].copy_(value)
        elif role != COUNT and bool(((value - start).abs() > EQUALS).any()):
            lost.append(role)
    return lost
