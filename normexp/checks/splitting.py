"""Whether a norm can be trained with its batch in parts."""

from __future__ import annotations

from torch import nn

from normexp.batching.sizes import Sizes
from normexp.checks.sites import name_some
from normexp.errors import UserError
from normexp.norms.site import named_sites


def check_split(network: nn.Module, sizes: Sizes) -> None:
    """Refuses a split step for norms that say their state is sequential.

    Parts of a step all begin at its start and are merged, which such a state does not survive. This
    is the norm's own word: a merged state is a number like any other, so it cannot be measured.
    """
    if sizes.norm == sizes.batch_size:
        return
    sequential = [
        name
        for name, site in named_sites(network)
        if any(getattr(module, "sequential_state", False) for module in site.modules())
    ]
    if sequential:
        key = "norm_batch_size" if sizes.norm < sizes.micro else "micro_batch_size"
        raise UserError(
            f"{key}={getattr(sizes, key)} splits a step of {sizes.batch_size} samples, and the "
            f"state of the norm at {name_some(sequential)} is sequential; try {key}=null"
        )
