"""What passes through a site, in one layout whatever its view."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normexp.norms.site import Site


def as_maps(x: Tensor, site: Site) -> Tensor:
    """`x` (N, C, *) or (B, T, C), as the site's view has it, as (N, C, P) with P positions."""
    if site.view != "map":
        return x.transpose(1, 2)
    return x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)


def input_and_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """What a forward hook saw a site receive, given by place or by name."""
    x = args[0] if args else kwargs["x"]
    mask = args[1] if len(args) > 1 else kwargs.get("mask")
    return x, mask
