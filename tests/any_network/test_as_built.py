"""Norms as built, and what a network does with its norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foreign_norms import MAPS, TOKENS, C, Calling, Film, Own, bare, rms
from torch import Tensor, nn
from torch.nn import functional

import normexp
from normexp.errors import UserError


class Fused(nn.Module):
    """Reads the weight of its norm in evaluation, as a fused kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        nn.init.uniform_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.norm(x)
        return functional.layer_norm(x, (C,), self.norm.weight, self.norm.bias, self.norm.eps)


def test_a_network_reads_the_norm_of_a_site_only_as_built() -> None:
    network = Fused()
    kept = normexp.replace_norms(network, "as_built", TOKENS).eval()
    assert torch.equal(kept(TOKENS), network.eval()(TOKENS))
    with pytest.raises(UserError, match='the weight of a replaced norm is read.*norm="as_built"'):
        normexp.replace_norms(network, "rms", TOKENS)
    assert not hasattr(normexp.replace_norms(network, "rms").norm, "weight")
    network.norm = bare(
        lambda m, x: m.weight * rms(x), weight=nn.Parameter(torch.ones(C)), bias=None
    )
    network.norm.eps = 1e-5
    with pytest.raises(UserError, match="the weight of a replaced norm is read"):
        normexp.replace_norms(network, "rms", TOKENS)


@pytest.mark.parametrize("args", [(torch.rand(4, 1),), ("mode",)])
def test_norms_as_built_get_all_their_arguments_in_parts(args: tuple[Any, ...]) -> None:
    """So they do if the formula is not known."""
    network = Calling(Film(), *args)
    whole, split = (
        normexp.replace_norms(network, "as_built", MAPS, norm_batch_size=size) for size in (None, 2)
    )
    assert torch.equal(whole(MAPS), network(MAPS))
    styles = [args] * 2 if args == ("mode",) else [(part,) for part in args[0].split(2)]
    parts = [network.inner(x, *style) for x, style in zip(MAPS.split(2), styles, strict=True)]
    torch.testing.assert_close(split(MAPS), torch.cat(parts))


class Remembering(nn.Module):
    """Undoes its norm by statistics that the norm keeps."""

    def __init__(self) -> None:
        super().__init__()

        def normalize(module: Own, x: Tensor) -> Tensor:
            module.size = x.detach().abs().mean()
            return module.p * rms(x)

        self.norm = Own(normalize)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.norm.size


def test_a_network_that_reads_what_its_norm_keeps_is_refused() -> None:
    network = Remembering()
    kept = normexp.replace_norms(network, "as_built", TOKENS)
    assert torch.equal(kept(TOKENS), network(TOKENS))
    with pytest.raises(UserError, match="no attribute 'size'"):
        normexp.replace_norms(network, "rms", TOKENS)
