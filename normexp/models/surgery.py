"""Replaces the norm modules of a network that was built without a norm factory by sites.

torch's norms are recognised by type, others by `norm` in the class name and by their tensors:
vectors of one length, named as in `NAMES`. The layout of these is found by running them on inputs.
A module with an activation inside its formula, such as EvoNorm, has further parameters and is not
recognised; one that holds an activation as a submodule, such as timm's BatchNormAct2d, is.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models.weights import MAX_NAMES, shorten
from normexp.norms.adapt import EPS_NAMES, FEATURE_NAMES, find_layout
from normexp.norms.contract import HasRamp
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site, modules_outside_sites

CHANNELS_FIRST = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm)  # subclasses may differ
# Norms in name only: they make channels compete, and keep the scale of their input.
NOT_REPLACED = ("GlobalResponseNorm", "LocalResponseNorm")
# Classes of transformers that multiply by 1 + weight.
ADD_ONE = (
    *("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "T5GemmaRMSNorm", "VaultGemmaRMSNorm"),
    *("RecurrentGemmaRMSNorm", "Qwen3NextRMSNorm", "NemotronLayerNorm1P"),
)
COUNT = "num_batches_tracked"
# The tensors of a norm by role: the names that libraries give them, and their initial values.
NAMES = {
    "weight": ("weight", "gamma", "scale", "gain", "g"),
    "bias": ("bias", "beta", "shift", "b"),
    "running_mean": ("running_mean",),
    "running_var": ("running_var",),
    COUNT: (COUNT,),
}
STARTS = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1, COUNT: 0}
ROLES = {name: role for role, names in NAMES.items() for name in names}
KEPT = ("drop", "act")  # submodules of norms that hold their activation, in the order of timm


@dataclass(frozen=True)
class ForeignNorm:
    """A norm module of the original network.

    Attributes:
        is_last: its channels are the last axis.
        settings: those of eps, momentum and affine that it has.
    """

    module: nn.Module
    num_features: int
    is_last: bool
    settings: dict[str, Any]

    @property
    def kept(self) -> dict[str, nn.Module]:
        """Its dropout and activation, by name."""
        return {name: child for name, child in self.module.named_children() if name in KEPT}

    def values(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields (role, own name, value) of weight, bias and running statistics.

        The weight is the factor on the normalized input.
        """
        for name, value in _own_tensors(self.module).items():
            if (role := ROLES.get(name)) is not None:
                added = role == "weight" and type(self.module).__name__ in ADD_ONE
                yield role, name, value + 1 if added else value


def recognise(module: nn.Module) -> ForeignNorm | str | None:
    """Describes a module that is a norm; a reason if it resembles one; None for any other."""
    name = type(module).__name__
    if not isinstance(module, (*CHANNELS_FIRST, *CHANNELS_LAST)):
        if "norm" not in name.lower() or name.startswith("_"):  # torch's weight norms
            return None
        if name in NOT_REPLACED:
            return "it keeps the scale of its input"
        if further := [key for key in _own_tensors(module) if key not in ROLES]:
            return f"its {further[0]} is neither a weight nor a running statistic"
    if children := [key for key, _ in module.named_children() if key not in KEPT]:
        # Without tensors of its own it is a block, whose norms are inside.
        return f"it holds {children[0]}" if _own_tensors(module) else None
    return describe(module)


def describe(module: nn.Module) -> ForeignNorm | str:
    """Describes a module as a norm, whatever its name; a reason if that is impossible."""
    num_features = _count_features(module)
    if isinstance(num_features, str):
        return num_features
    is_last = type(module) in CHANNELS_LAST
    if not is_last and not isinstance(module, CHANNELS_FIRST):
        target = type(module).__name__
        try:
            layout = find_layout(lambda _: copy.deepcopy(module).cpu(), num_features, target=target)
        except UserError as error:
            return str(error).removeprefix(f"norm._target_={target} ").partition("; norm.layout")[0]
        is_last = layout.channels_last
    settings: dict[str, Any] = {
        "affine": any(ROLES.get(name) == "weight" for name in _own_tensors(module))
    }
    eps = next((vars(module)[name] for name in EPS_NAMES if name in vars(module)), None)
    if isinstance(module, nn.RMSNorm) and eps is None:
        eps = torch.finfo(torch.float32).eps
    if isinstance(eps, float | int):
        settings["eps"] = float(eps)
    if "momentum" in vars(module):
        settings["momentum"] = module.momentum
    return ForeignNorm(module, num_features, is_last, settings)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, without those of submodules."""
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }


def _count_features(module: nn.Module) -> int | str:
    """The number of channels, or the reason why it is unknown."""
    tensors = [value for value in _own_tensors(module).values() if value.ndim]
    sizes = {value.numel() for value in tensors}
    named = [getattr(module, name, None) for name in FEATURE_NAMES] if not sizes else []
    several = [n for n in named if isinstance(n, tuple) and len(n) > 1]
    if several or len(sizes) > 1 or any(value.ndim > 1 for value in tensors):
        return "it normalizes several axes; a site normalizes one axis of channels"
    known = [*sizes, *(n[0] if isinstance(n, tuple) else n for n in named)]
    return next((n for n in known if isinstance(n, int)), "its number of channels is not known")


class SiteWithActivation(nn.Sequential):
    """A site, then the old norm's dropout and activation, under the names that they had."""

    adds_level = "site"


@dataclass
class Surgery:
    """The record of what was replaced in a network.

    Attributes:
        classes: the class of the old norm, by site.
        left: classes that may be norms but were left alone, with the reason.
        lost: old tensors that training had changed, and that have no place in the new norm.
        keeps_norms: the old norms are inside of the sites.
    """

    left: dict[str, str]
    keeps_norms: bool
    classes: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def notes(self) -> Iterator[str]:
        """Yields the lines of the log."""
        counts = Counter(self.classes.values()).items()
        classes = ", ".join(f"{number} {name}" for name, number in counts)
        names = list(self.classes)
        where = ", ".join(names)
        if len(names) > MAX_NAMES:
            where = f"first {names[0]}, last {names[-1]}"
        place = "around" if self.keeps_norms else "in place of"
        yield f"{len(names)} sites {place} {classes}: {where}"
        if self.left:
            left = ", ".join(f"{name} ({why})" for name, why in self.left.items())
            yield f"left alone: {left}; model.replace=[Class] names all classes to replace"
        if self.lost:
            yield f"the new norm has no place for {shorten(self.lost)}"


def replace_norms(
    network: nn.Module, factory: NormFactory, only: Sequence[str] | None = None
) -> Surgery:
    """Puts a site in place of every norm of `network`, in the layout of the old norm.

    Submodules keep their names and order. A norm that is used in several places becomes one site.
    Eps, momentum and affine of the old norm go to the factory; its weight, bias and running
    statistics go to the new norm where that has a tensor of the same role and shape.

    Args:
        only: names of the classes to replace; None for all norms that are recognised.

    Raises:
        UserError: no norm, or no module of a class in `only`.
    """
    norms, left = _find_norms(network, only)
    surgery = Surgery(left, factory.keeps_norms)
    new: dict[nn.Module, nn.Module] = {}
    for name, old in list(network.named_modules(remove_duplicate=False)):
        if old in norms and old not in new:
            norm = norms[old]
            kept = norm.kept
            site, lost = _site_for(norm, factory)
            new[old] = SiteWithActivation() if kept else site
            for child, module in {"site": site, **kept}.items() if kept else ():
                new[old].add_module(child, module)
            surgery.classes[name] = type(old).__name__
            surgery.lost += [f"{name}.{own}" for own in lost]
        if old in new:
            network.set_submodule(name, new[old])
    for module in network.modules():
        if hasattr(module, "inplace"):  # a norm may need its output for its gradient
            setattr(module, "inplace", False)  # noqa: B010 (nn.Module is typed to hold no bool)
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else its fast path reads the weights of LayerNorm
    return surgery


def _site_for(norm: ForeignNorm, factory: NormFactory) -> tuple[Site, list[str]]:
    """A site with a new norm, or around the old one; and the old tensors that have no place."""
    if factory.keeps_norms:
        for child in norm.kept:  # they follow the site
            setattr(norm.module, child, nn.Identity())
        return factory.around(norm.module, is_last=norm.is_last), []
    build = factory.tokens if norm.is_last else factory
    site = build(norm.num_features, **norm.settings)
    return site, _carry_over(norm, site)


def _find_norms(
    network: nn.Module, only: Sequence[str] | None
) -> tuple[dict[nn.Module, ForeignNorm], dict[str, str]]:
    """The norms to replace, and why other classes are left alone, by class name."""
    norms: dict[nn.Module, ForeignNorm] = {}
    left: dict[str, str] = {}
    for module in modules_outside_sites(network):
        name, norm = type(module).__name__, None
        if only is None:
            norm = recognise(module)
        elif name in only:
            norm = describe(module)
            if isinstance(norm, str):
                raise UserError(f"model.replace=[{name}]: {norm}")
        if isinstance(norm, ForeignNorm):
            norms[module] = norm
        elif norm is not None:
            left[name] = norm
    missing = sorted(set(only or ()) - {type(module).__name__ for module in norms})
    if missing or not norms:
        raise UserError(_why_nothing(network, missing, left))
    return norms, left


def _why_nothing(network: nn.Module, missing: Sequence[str], left: Mapping[str, str]) -> str:
    leaves = Counter(type(m).__name__ for m in network.modules() if not any(m.children()))
    has = ", ".join(f"{count} {name}" for name, count in leaves.most_common(8))
    if missing:
        return f"model.replace: the network has no {missing[0]}; it has {has}"
    why = "".join(f", and {name} is left alone: {reason}" for name, reason in left.items())
    return (
        f"the network has no norm that is recognised (it has {has}{why}); name the classes of its "
        "norms, as model.replace=[MyNorm], or build them from an argument `norm`"
    )


@torch.no_grad()
def _carry_over(old: ForeignNorm, site: Site) -> list[str]:
    """Copies weight, bias and running statistics; returns trained tensors that have no place.

    A weight is copied only to one that starts at one, a bias only to one that starts at zero. A
    norm with a warm-up or ramp keeps its own count of batches, which must start at 0.
    """
    tensors = {**dict(site.norm.named_parameters()), **dict(site.norm.named_buffers())}
    if isinstance(site.norm, HasRamp):
        tensors.pop(COUNT, None)
    lost = []
    for role, own, value in old.values():
        fitting = [
            tensor
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] == role
            and tensor.shape == value.shape
            and (role not in ("weight", "bias") or bool((tensor == STARTS[role]).all()))
        ]
        if len(fitting) == 1:
            fitting[0].copy_(value)
        elif role != COUNT and bool((value != STARTS[role]).any()):
            lost.append(own)
    return lost
