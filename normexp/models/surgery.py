"""Sites in place of the norm modules of a network that was built without a norm factory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models.common import modules_outside_sites
from normexp.models.foreign_norms import ForeignNorm, describe, kind_of, recognise
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site, named_sites

COUNT = "num_batches_tracked"
# First values of a norm's tensors.
STARTS = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1, COUNT: 0}
MOST_NAMES = 4  # that a line of the log spells out


class ChannelsLast(nn.Module):
    """A token site for x (N, *, C): it sees the positions * as one axis."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        return self.site(x.reshape(len(x), -1, x.shape[-1])).view(x.shape)


class SiteWithActivation(nn.Module):
    """A site, and the dropout and activation of the norm that it replaces, under their names."""

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
    """What was replaced in a network.

    Attributes:
        classes: the class of the old norm, by site.
        settings: how often each eps, momentum and affine occurred in the replaced norms.
        left: classes that may be norms but were left alone, with the reason.
        carried: names of tensors in sites, and the names of the old ones whose values they hold.
        dropped: names of old tensors for which the new norm has no place.
        lost: those of them that a training has changed.
    """

    classes: dict[str, str] = field(default_factory=dict)
    settings: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def note(self, name: str, old: ForeignNorm, new: nn.Module, carried: Mapping[str, str]) -> None:
        """Adds the norm that was called `name`; `carried` has its tensors' names by new ones."""
        self.classes[name] = type(old.module).__name__
        self.settings[", ".join(f"{k}={v}".lower() for k, v in sorted(old.settings.items()))] += 1
        ((inner, _),) = named_sites(new)
        prefix = ".".join(filter(None, (name, inner, "norm")))
        self.carried |= {f"{prefix}.{key}": f"{name}.{own}" for key, own in carried.items()}
        for role, own, value in old.values():
            if own not in carried.values():
                self.dropped.append(f"{name}.{own}")
                if role != COUNT and bool((value != STARTS[role]).any()):
                    self.lost.append(f"{name}.{own}")

    def notes(self) -> Iterator[str]:
        """Yields the lines of the log."""
        classes = ", ".join(f"{n} {name}" for name, n in Counter(self.classes.values()).items())
        yield f"{_sites(len(self.classes))} in place of {classes}: {', '.join(self.classes)}"
        settings = ", ".join(f"{each} at {_sites(count)}" for each, count in self.settings.items())
        yield f"sites keep settings of the old norms that the config leaves at default: {settings}"
        if self.left:
            left = ", ".join(f"{name} ({why})" for name, why in self.left.items())
            yield f"left alone: {left}; model.replace=[Class] names all classes to replace"
        if self.lost:
            yield f"the new norm has no place for {shorten(self.lost)}"


def replace_norms(
    network: nn.Module, factory: NormFactory, only: Sequence[str] | None = None
) -> Surgery:
    """Puts a site in place of every norm of `network`, in the layout of the old norm.

    Names and order of the submodules stay. A norm that stands in several places becomes one site.
    Eps, momentum and affine of the old norm go to the factory; its weight, bias and running
    statistics to the new norm, where that has a tensor of the same role and shape.

    Args:
        only: names of the classes to replace; None for all norms that are recognised.

    Raises:
        UserError: no norm, or no module of a class in `only`.
    """
    found, left = _find_norms(network, only)
    surgery = Surgery(left=left)
    new: dict[nn.Module, nn.Module] = {}
    for name, old in list(network.named_modules(remove_duplicate=False)):
        if old in found and old not in new:
            new[old], site = _build_site(found[old], factory)
            carried = _carry_over(found[old], site)
            surgery.note(name, found[old], new[old], carried)
        if old in new:
            network.set_submodule(name, new[old])
    for module in network.modules():
        if hasattr(module, "inplace"):  # a norm may need its output for its gradient
            setattr(module, "inplace", False)  # noqa: B010 (nn.Module is typed to hold no bool)
        if isinstance(module, nn.TransformerEncoderLayer):
            torch.backends.mha.set_fastpath_enabled(False)  # which reads weights of a LayerNorm
    return surgery


def _find_norms(
    network: nn.Module, only: Sequence[str] | None
) -> tuple[dict[nn.Module, ForeignNorm], dict[str, str]]:
    """The norms to replace, and reasons why other classes were left. Raises UserError."""
    known: dict[Any, ForeignNorm | str | None] = {}
    found: dict[nn.Module, ForeignNorm] = {}
    left: dict[str, str] = {}
    for module in modules_outside_sites(network):
        name, kind = type(module).__name__, kind_of(module)
        if kind not in known:
            known[kind] = recognise(module) if only is None else None
            if only is not None and name in only:
                known[kind] = _describe(module)
        norm = known[kind]
        if isinstance(norm, ForeignNorm):
            kept = {key: module.get_submodule(key) for key in norm.kept}
            found[module] = replace(norm, module=module, kept=kept)
        elif isinstance(norm, str):
            left[name] = norm
    if only is None:  # a class that is recognised in some places alone would be replaced by half
        whole = {type(m).__name__ for m in found if type(m).__module__.startswith("torch.nn.")}
        found = {m: n for m, n in found.items() if type(m).__name__ not in set(left) - whole}
    missing = sorted(set(only or ()) - {type(module).__name__ for module in found})
    if missing or not found:
        raise UserError(_why_nothing(network, missing, left))
    return found, left


def _describe(module: nn.Module) -> ForeignNorm:
    try:
        return describe(module)
    except UserError as error:
        raise UserError(f"model.replace=[{type(module).__name__}]: {error}") from error


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


def _build_site(old: ForeignNorm, factory: NormFactory) -> tuple[nn.Module, Site]:
    """What takes the place of `old`, and the site in it."""
    if old.layout.channels_last:
        site = factory.tokens(old.num_features, **old.settings)
        new: nn.Module = ChannelsLast(site)
    else:
        new = site = factory(old.num_features, **old.settings)
    return SiteWithActivation(new, old.kept) if old.kept else new, site


@torch.no_grad()
def _carry_over(old: ForeignNorm, site: Site) -> dict[str, str]:
    """Copies weight, bias and running statistics; returns the old name by the new one.

    A weight is carried over to one that starts at one, and a bias to one that starts at zero. The
    count of batches is not carried over to a norm whose warm-up or ramp counts those of a training.
    """
    tensors = {**dict(site.norm.named_parameters()), **dict(site.norm.named_buffers())}
    if hasattr(site.norm, "num_training_steps"):
        tensors.pop(COUNT, None)
    carried = {}
    for role, own, value in old.values():
        fitting = [
            name
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] == role
            and tensor.shape == value.shape
            and (role not in ("weight", "bias") or bool((tensor == STARTS[role]).all()))
        ]
        if len(fitting) == 1:
            tensors[fitting[0]].copy_(value)
            carried[fitting[0]] = own
    return carried


def _sites(count: int) -> str:
    return f"{count} site{'s' * (count != 1)}"


def shorten(names: Iterable[str]) -> str:
    """`fc.weight, fc.bias`; beyond a few, how many have each last word: `20 weight, 20 bias`."""
    names = list(names)
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    counts = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{count} {word}" for word, count in counts.items())
