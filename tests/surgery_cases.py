"""Surgery on the norms of a network, without a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from normexp.any_network.recognise import recognise
from normexp.any_network.surgery import Surgery, put_sites
from normexp.any_network.trial import Inputs
from normexp.norms.factory import NormFactory

layer_norm = partial(nn.GroupNorm, 1)  # over the channels (and positions) of each sample


def replaced(
    network: nn.Module, factory: NormFactory, x: Tensor, only: Sequence[str] | None = None
) -> Surgery:
    """Replaces the norms that a forward on `x` shows."""
    return put_sites(network, factory, recognise(network, Inputs.of(x)), only)


def taking_settings(make: Callable[..., nn.Module]) -> NormFactory:
    """A factory that passes `make` those settings of a replaced norm that it takes."""
    known = inspect.signature(make).parameters

    def build_norm(num_features: int, **settings: Any) -> nn.Module:
        return make(num_features, **{k: v for k, v in settings.items() if k in known})

    return NormFactory(build_norm)
