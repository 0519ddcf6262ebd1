"""What a site receives or returns, in one layout whatever its view."""

from __future__ import annotations

from torch import Tensor

from normexp.norms.contract import Site


def as_maps(x: Tensor, site: Site) -> Tensor:
    """`x` (N, C, *) or (B, T, C), as the site's view has it, as (N, C, P) with P positions."""
    if site.view != "map":
        return x.transpose(1, 2)
    return x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)


def received(args: tuple[Tensor | None, ...], kwargs: dict[str, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Input and mask of a call of a site, given by place or by name."""
    x = args[0] if args else kwargs["x"]
    mask = args[1] if len(args) > 1 else kwargs.get("mask")
    assert x is not None
    return x, mask
