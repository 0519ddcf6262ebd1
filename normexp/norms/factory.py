"""The norm factory that every model takes: it builds each norm and the parts around it.

    self.norm1 = norm(width)                          a site for maps (N, C, *)
    self.norm2 = norm.tokens(width)                   a site for tokens (B, T, C)
    self.act = norm.act(width)                        a slot, see config/slots.py
    self.conv = norm.conv(3, width, kernel_size=3)    another slot

A model never asks which norm it got. norms/parts.py has the modules that slots build.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from normexp.errors import UserError
from normexp.norms.parts import ACTIVATIONS, CONVOLUTIONS, ResidualScale
from normexp.norms.site import AsBuiltSite, Site, View, named_sites
from normexp.training.config.keys import RunningFrom
from normexp.training.config.slots import Placement, Slots


@dataclass(eq=False)
class NormFactory:
    """Builds the norm of each site, and what the slots put around it.

    Args:
        make: builds the bare norm from the number of features, and `settings` if a model has any.
        view: how a token site shows (B, T, C) to the norm: `token` as (B*T, C), each position a
            sample of its own; `sequence` as (B, C, T), where a norm may pool positions.
        norm_batch_size: samples that share batch statistics in training; None for all of a forward.
        running_from: what running averages are taken from where a step is split, see norms/site.py.
        slots: what surrounds a norm.
        keeps_norms: a network keeps the norms that it has, see `around`; `make` refuses.
        at: builds the norms of single sites, by a glob of their names; see `put_norms`.
        keeps_padding: of every site, see there.

    Attributes:
        used: the slots that models have asked for; setting any other is refused.
    """

    make: Callable[..., nn.Module]
    _: KW_ONLY
    view: Literal["token", "sequence"] = "token"
    norm_batch_size: int | None = None
    running_from: RunningFrom = "step"
    slots: Slots = Slots()
    keeps_norms: bool = False
    at: Mapping[str, NormFactory] = field(default_factory=dict)
    keeps_padding: bool = False
    used: set[str] = field(default_factory=set, init=False)

    def __call__(self, num_features: int, **settings: Any) -> Site:
        """Returns a site for maps (N, C, *). For `settings`, see `bare`."""
        return self._site("map", num_features, settings)

    def tokens(self, num_features: int, **settings: Any) -> Site:
        """Returns a site for tokens (B, T, C) or (N, *, C). For `settings`, see `bare`."""
        return self._site(self.view, num_features, settings)

    def _site(self, view: View, num_features: int, settings: Mapping[str, Any]) -> Site:
        norm = self.bare(num_features, **settings)
        site = Site(norm, view, self.norm_batch_size, self.running_from)
        site.num_features = num_features
        site.keeps_padding = self.keeps_padding
        return site

    def around(self, norm: nn.Module, *, is_last: bool) -> AsBuiltSite:
        """Returns a site around a norm that a network already has, which runs as it is.

        Args:
            is_last: the norm takes its channels as the last axis, as nn.LayerNorm does.
        """
        view = "token" if is_last else "map"
        return AsBuiltSite(norm, view, self.norm_batch_size, self.running_from)

    def put_norms(self, network: nn.Module) -> None:
        """Puts the norms of `at` into the sites whose names match their globs.

        Raises:
            UserError: a glob that matches no site.
        """
        sites = dict(named_sites(network))
        for glob, factory in self.at.items():
            names = fnmatch.filter(sites, glob)
            if not names:
                raise UserError(
                    f"norm.at={{{glob}:...}}: no such site; the sites are {', '.join(sites)}"
                )
            for name in names:
                build = factory if sites[name].view == "map" else factory.tokens
                network.set_submodule(name, build(sites[name].num_features))

    def unsplit(self) -> NormFactory:
        """Returns a factory of the same norms that does not divide a forward into sub-batches."""
        at = {glob: factory.unsplit() for glob, factory in self.at.items()}
        return replace(self, norm_batch_size=None, at=at)

    def keeping_padding(self) -> NormFactory:
        """Returns a factory of the same norms in sites that keep padding in."""
        at = {glob: factory.keeping_padding() for glob, factory in self.at.items()}
        return replace(self, keeps_padding=True, at=at)

    def bare(self, num_features: int, **settings: Any) -> nn.Module:
        """Returns a norm without a site.

        Restores the random state, so that a model starts from the same weights with every norm.

        Args:
            settings: of the norm that this one replaces, as eps, momentum and affine; `make`
                applies those that the new norm has and the config does not set.
        """
        with torch.random.fork_rng(devices=[]):
            return self.make(num_features, **settings)

    def changed_slots(self) -> dict[str, Any]:
        """Returns the slots whose values are not the default ones."""
        default = vars(Slots())
        return {slot: value for slot, value in vars(self.slots).items() if value != default[slot]}

    def act(self, num_features: int) -> nn.Module:
        """Returns the activation after a norm of `num_features`, on maps (N, C, *)."""
        return ACTIVATIONS[self._use("act")](num_features)

    def conv(self, *args: Any, **kwargs: Any) -> nn.Conv2d:
        """Returns a convolution over (N, C, H, W); arguments as nn.Conv2d."""
        return CONVOLUTIONS[self._use("conv")](*args, **kwargs)

    def residual(self, *shape: int) -> nn.Module:
        """Returns the last module of a residual branch; any shape in and out.

        Args:
            shape: of the numbers of `layer_scale`, one per channel: (C,) for tokens, (C, 1, 1) for
                maps. Without a shape the branch ignores `layer_scale`.
        """
        scales = []
        residual_scale = self._use("residual_scale")
        if residual_scale is not None:
            scales.append(ResidualScale(residual_scale))
        layer_scale = self._use("layer_scale") if shape else None
        if layer_scale is not None:
            scales.append(ResidualScale(layer_scale, shape))
        return scales[0] if len(scales) == 1 else nn.Sequential(*scales)

    @property
    def placement(self) -> Placement:
        """Where norms sit in a transformer block."""
        return self._use("placement")

    @property
    def qk_norm(self) -> bool:
        """True if attention normalizes its queries and keys."""
        return self._use("qk_norm")

    @property
    def v_norm(self) -> bool:
        """True if attention normalizes its values."""
        return self._use("v_norm")

    def _use(self, slot: str) -> Any:
        self.used.add(slot)
        return getattr(self.slots, slot)


class AsBuilt(nn.Module):
    """Stands in a config for the norms that a network already has, and is never built.

    `any_network/surgery.py` puts a site around each of them.
    """


def is_shipped(target: str) -> bool:
    """True for the import path of a norm of this package, which needs no adapter."""
    return target.startswith("normexp.norms.")
