"""Initial weights, drawn from torch's global generator; norms initialise themselves."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normexp.norms.site import Site


def modules_outside_sites(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its descendants, without sites and their contents."""
    if isinstance(module, Site):
        return
    yield module
    for child in module.children():
        yield from modules_outside_sites(child)


def init_conv_net(model: nn.Module) -> None:
    """Normal with variance 2 / fan_in before a ReLU (He et al. 2015, arXiv:1502.01852).

    The linear head, which no ReLU follows, gets variance 1 / fan_in and a zero bias.
    """
    for module in modules_outside_sites(model):
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.zeros_(module.bias)
