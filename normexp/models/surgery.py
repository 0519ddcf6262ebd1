"""Replaces the norm modules of a network that was built without a norm factory by sites.

torch's norms are recognised by type, others by `norm` in the class name and by their tensors:
vectors of one length, named as in `NAMES`. The layout of these is found by running them on inputs.
A module with an activation inside its formula, such as EvoNorm, has further parameters and is not
recognised; one that holds an activation as a submodule, such as timm's BatchNormAct2d, is.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models.common import modules_outside_sites
from normexp.norms.adapt import EPS_NAMES, FEATURE_NAMES, Layout, find_layout
from normexp.norms.contract import HasRamp
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site, named_sites

CHANNELS_FIRST = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm)  # subclasses may differ
# Norms in name only: they make channels compete, and keep the scale of their input.
NOT_REPLACED = ("GlobalResponseNorm", "LocalResponseNorm")
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
MAX_NAMES = 4  # spelled out in a line of the log


@dataclass(frozen=True)
class ForeignNorm:
    """A norm module of the original network.

    Attributes:
        layout: where its channels are.
        settings: those of eps, momentum and affine that it has.
    """

    module: nn.Module
    num_features: int
    layout: Layout
    settings: dict[str, Any]

    @property
    def kept(self) -> dict[str, nn.Module]:
        """Its dropout and activation, by name."""
        return {name: child for name, child in self.module.named_children() if name in KEPT}

    def values(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields (role, own name, value) of weight, bias and running statistics.

        The weight is the factor on the normalized input: for a norm that multiplies by 1 + weight,
        one is added.
        """
        for name, value in _own_tensors(self.module).items():
            if (role := ROLES.get(name)) is not None:
                added = role == "weight" and self._adds_one_to(name)
                yield role, name, value + 1 if added else value

    def _adds_one_to(self, weight: str) -> bool:
        """True if the norm multiplies by 1 + weight: at weight zero its output is not zero."""
        if isinstance(self.module, (*CHANNELS_FIRST, *CHANNELS_LAST)):
            return False
        copied = copy.deepcopy(self.module).eval()
        for child in self.kept:
            setattr(copied, child, nn.Identity())
        sizes = [2] * (self.layout.num_dims[-1] - 1)
        sizes.insert(len(sizes) if self.layout.channels_last else 1, self.num_features)
        x = torch.linspace(-1, 2, torch.Size(sizes).numel()).view(sizes)
        with torch.no_grad():
            for name, value in _own_tensors(copied).items():
                if name == weight or ROLES.get(name) == "bias":
                    value.zero_()
            return bool(copied(x).any())


Layouts = dict[tuple[Any, ...], Layout | str]  # a cache; a string says why there is no layout


def recognise(module: nn.Module, known: Layouts) -> ForeignNorm | str | None:
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
    return describe(module, known)


def describe(module: nn.Module, known: Layouts) -> ForeignNorm | str:
    """Describes a module as a norm, whatever its name; a reason if that is impossible."""
    num_features = _count_features(module)
    if isinstance(num_features, str):
        return num_features
    layout = _layout_of(module, num_features, known)
    if isinstance(layout, str):
        return layout
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
    return ForeignNorm(module, num_features, layout, settings)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, without those of submodules."""
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }


def _count_features(module: nn.Module) -> int | str:
    """The number of channels, or the reason why it is unknown."""
    vectors = {value.numel() for value in _own_tensors(module).values() if value.ndim == 1}
    shapes = {value.shape for value in _own_tensors(module).values() if value.ndim > 1}
    if len(vectors) == 1 and vectors != {1} and not shapes:
        return vectors.pop()
    if vectors <= {1} and not shapes:
        for name in FEATURE_NAMES:
            value = getattr(module, name, None)
            if isinstance(value, tuple) and len(value) == 1:
                value = value[0]
            if isinstance(value, int) and value > 0:
                return value
    if shapes or isinstance(getattr(module, "normalized_shape", None), tuple):
        return "it normalizes several axes; a site normalizes one axis of channels"
    return "its number of channels is not known"


def _layout_of(module: nn.Module, num_features: int, known: Layouts) -> Layout | str:
    """Where the channels are, or the reason why that is unknown."""
    if isinstance(module, CHANNELS_FIRST):
        return Layout(channels_last=False, num_dims=(4,))
    if type(module) in CHANNELS_LAST:
        return Layout(channels_last=True, num_dims=(3,))
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    arguments = inspect.signature(module.forward).parameters.values()
    if any(p.default is p.empty for p in [p for p in arguments if p.kind not in several][1:]):
        return "its forward takes more than the input"
    shapes = tuple((name, value.shape) for name, value in _own_tensors(module).items())
    plain = (bool, int, float, str, tuple, type(None))
    knobs = {name: value for name, value in vars(module).items() if isinstance(value, plain)}
    kind = (type(module), shapes, repr(sorted(knobs.items())))
    target = type(module).__name__
    if kind not in known:
        try:
            layout = find_layout(lambda _: copy.deepcopy(module).cpu(), num_features, target=target)
        except UserError as error:
            layout = str(error).removeprefix(f"norm._target_={target} ")
        known[kind] = layout
    return known[kind]


class ChannelsLast(nn.Module):
    """Adapts a token site to x (N, *, C) by joining the positions * to one axis."""

    adds_level = "site"

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        return self.site(x.reshape(len(x), -1, x.shape[-1])).view(x.shape)


class SiteWithActivation(nn.Module):
    """A site, then the old norm's dropout and activation, under the names that they had."""

    adds_level = "site"

    def __init__(self, site: nn.Module, kept: dict[str, nn.Module]) -> None:
        super().__init__()
        self.site = site
        for name, module in kept.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


@dataclass
class Surgery:
    """The record of what was replaced in a network.

    Attributes:
        classes: the class of the old norm, by site.
        settings: how often each combination of eps, momentum and affine occurred.
        left: classes that may be norms but were left alone, with the reason.
        carried: by the name of a site's tensor, the name of the old tensor whose value it holds.
        dropped: names of old tensors that have no counterpart in the new norm.
        lost: the dropped tensors that training had changed.
        keeps_norms: the old norms are inside of the sites.
    """

    classes: dict[str, str] = field(default_factory=dict)
    settings: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    keeps_norms: bool = False

    def note(self, name: str, old: ForeignNorm, new: nn.Module, carried: Mapping[str, str]) -> None:
        """Records the replacement of the norm `name`; `carried`: old tensor names by new ones."""
        self.classes[name] = type(old.module).__name__
        self.settings[", ".join(f"{k}={v}".lower() for k, v in sorted(old.settings.items()))] += 1
        ((inner, _),) = named_sites(new)
        prefix = ".".join(filter(None, (name, inner, "norm")))
        self.carried |= {
            f"{prefix}.{key}": f"{name}.{old_name}" for key, old_name in carried.items()
        }
        for role, old_name, value in old.values():
            if old_name not in carried.values():
                self.dropped.append(f"{name}.{old_name}")
                if role != COUNT and bool((value != STARTS[role]).any()):
                    self.lost.append(f"{name}.{old_name}")

    def notes(self) -> Iterator[str]:
        """Yields the lines of the log."""
        classes = ", ".join(f"{n} {name}" for name, n in Counter(self.classes.values()).items())
        place = "around" if self.keeps_norms else "in place of"
        names = list(self.classes)
        where = f": {', '.join(names)}"
        if len(names) > MAX_NAMES:
            where = f", first {names[0]}, last {names[-1]}"
        yield f"{_sites(len(names))} {place} {classes}{where}"
        settings = ", ".join(
            f"{setting} at {_sites(count)}" for setting, count in self.settings.items()
        )
        if self.keeps_norms:
            yield f"norms as built: {settings}"
        else:
            yield (
                "sites keep settings of the old norms that the config leaves at default: "
                f"{settings}"
            )
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
    surgery = Surgery(left=left, keeps_norms=factory.keeps_norms)
    new: dict[nn.Module, nn.Module] = {}
    for name, old in list(network.named_modules(remove_duplicate=False)):
        if old in norms and old not in new:
            norm = norms[old]
            kept = norm.kept
            site, carried = _site_for(norm, factory)
            new[old] = ChannelsLast(site) if norm.layout.channels_last else site
            if kept:
                new[old] = SiteWithActivation(new[old], kept)
            surgery.note(name, norm, new[old], carried)
        if old in new:
            network.set_submodule(name, new[old])
    for module in network.modules():
        if hasattr(module, "inplace"):  # a norm may need its output for its gradient
            setattr(module, "inplace", False)  # noqa: B010 (nn.Module is typed to hold no bool)
        if isinstance(module, nn.TransformerEncoderLayer):
            torch.backends.mha.set_fastpath_enabled(False)  # it reads the weights of a LayerNorm
    return surgery


def _site_for(norm: ForeignNorm, factory: NormFactory) -> tuple[Site, dict[str, str]]:
    """A site with a new norm, or around the old one; and the old tensor names by the new ones."""
    is_last = norm.layout.channels_last
    if factory.keeps_norms:
        for child in norm.kept:  # they follow the site
            setattr(norm.module, child, nn.Identity())
        return factory.around(norm.module, is_last=is_last), {
            n: n for n in _own_tensors(norm.module)
        }
    build = factory.tokens if is_last else factory
    site = build(norm.num_features, **norm.settings)
    return site, _carry_over(norm, site)


def _find_norms(
    network: nn.Module, only: Sequence[str] | None
) -> tuple[dict[nn.Module, ForeignNorm], dict[str, str]]:
    """The norms to replace, and why other classes are left alone, by class name."""
    known: Layouts = {}
    norms: dict[nn.Module, ForeignNorm] = {}
    left: dict[str, str] = {}
    for module in modules_outside_sites(network):
        name, norm = type(module).__name__, None
        if only is None:
            norm = recognise(module, known)
        elif name in only:
            norm = describe(module, known)
            if isinstance(norm, str):
                raise UserError(f"model.replace=[{name}]: {norm}")
        if isinstance(norm, ForeignNorm):
            norms[module] = norm
        elif norm is not None:
            left[name] = norm
    if only is None:  # do not half-replace a class that is recognised only in some places
        whole = {type(m).__name__ for m in norms if type(m).__module__.startswith("torch.nn.")}
        norms = {m: n for m, n in norms.items() if type(m).__name__ not in set(left) - whole}
    missing = sorted(set(only or ()) - {type(module).__name__ for module in norms})
    if missing or not norms:
        raise UserError(_why_nothing(network, missing, left))
    return norms, left


def _why_nothing(network: nn.Module, missing: Sequence[str], left: Mapping[str, str]) -> str:
    leaves = Counter(type(m).__name__ for m in network.modules() if not any(m.children()))
    has = ", ".join(f"{count} {name}" for name, count in leaves.most_common(8))
    if missing:
        near = get_close_matches(missing[0], leaves, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {has}"
        return f"model.replace: the network has no {missing[0]}; {hint}"
    why = "".join(f", and {name} is left alone: {reason}" for name, reason in left.items())
    return (
        f"the network has no norm that is recognised (it has {has}{why}); name the classes of its "
        "norms, as model.replace=[MyNorm], or build them from an argument `norm`, conf/README.md"
    )


@torch.no_grad()
def _carry_over(old: ForeignNorm, site: Site) -> dict[str, str]:
    """Copies weight, bias and running statistics; returns the old names by the new names.

    A weight is copied only to one that starts at one, a bias only to one that starts at zero. A
    norm with a warm-up or ramp keeps its own count of batches, which must start at 0.
    """
    tensors = {**dict(site.norm.named_parameters()), **dict(site.norm.named_buffers())}
    if isinstance(site.norm, HasRamp):
        tensors.pop(COUNT, None)
    carried = {}
    for role, old_name, value in old.values():
        fitting = [
            name
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] == role
            and tensor.shape == value.shape
            and (role not in ("weight", "bias") or bool((tensor == STARTS[role]).all()))
        ]
        if len(fitting) == 1:
            tensors[fitting[0]].copy_(value)
            carried[fitting[0]] = old_name
    return carried


def _sites(count: int) -> str:
    return f"{count} site{'s' * (count != 1)}"


def shorten(names: Iterable[str]) -> str:
    """`fc.weight, fc.bias`; beyond MAX_NAMES, counts by last word: `20 weight, 20 bias`."""
    names = list(names)
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    counts = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{count} {word}" for word, count in counts.items())
