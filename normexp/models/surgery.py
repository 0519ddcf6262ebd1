"""Sites in place of the norm modules of a finished network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.models.common import modules_outside_sites
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site

# torch's norms of (N, C, *), by the attribute that holds C.
MAP_NORMS: dict[type[nn.Module], str] = {
    nn.BatchNorm1d: "num_features",
    nn.BatchNorm2d: "num_features",
    nn.BatchNorm3d: "num_features",
    nn.SyncBatchNorm: "num_features",
    nn.InstanceNorm1d: "num_features",
    nn.InstanceNorm2d: "num_features",
    nn.InstanceNorm3d: "num_features",
    nn.GroupNorm: "num_channels",
}
# torch's norms of the trailing axes, (N, *, C).
LAST_AXIS_NORMS = (nn.LayerNorm, nn.RMSNorm)


class ChannelsLast(nn.Module):
    """A token site for x (N, *, C): it sees the positions * as one axis."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        return self.site(x.reshape(len(x), -1, x.shape[-1])).view(x.shape)


def replace_norms(network: nn.Module, factory: NormFactory) -> None:
    """Puts a site in place of every torch norm in `network`, in the layout of the old norm.

    Names and order of the submodules stay; the old parameters are dropped. A norm that stands in
    several places becomes one site.

    Raises:
        UserError: a norm over several trailing axes.
    """
    sites: dict[nn.Module, nn.Module] = {}
    for parent in list(modules_outside_sites(network)):
        # named_children would leave out the second name of a module.
        for name, child in list(parent.named_modules(remove_duplicate=False)):
            if not name or "." in name:
                continue
            if child not in sites and (site := build_site(child, factory)) is not None:
                sites[child] = site
            if child in sites:
                setattr(parent, name, sites[child])


def build_site(old: nn.Module, factory: NormFactory) -> nn.Module | None:
    """A site for the features and layout of `old`; None if `old` is not a torch norm."""
    for kind, attribute in MAP_NORMS.items():
        if isinstance(old, kind):
            return factory(getattr(old, attribute))
    if not isinstance(old, LAST_AXIS_NORMS):
        return None
    *others, num_features = old.normalized_shape
    if others:
        raise UserError(f"{old} normalises several axes; a site normalises one axis of channels")
    if takes_maps(old, num_features):
        return factory(num_features)
    return ChannelsLast(factory.tokens(num_features))


def takes_maps(norm: nn.Module, num_features: int) -> bool:
    """True if a probe shows that a subclass of LayerNorm, like ConvNeXt's, takes (N, C, H, W)."""
    if type(norm) in LAST_AXIS_NORMS:
        return False
    try:
        norm(torch.zeros(1, num_features, 1, num_features + 1))
    except RuntimeError:
        return False
    return True
