"""Norms as other people write them, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

C = 6
TOKENS, MAPS, ROWS = torch.randn(4, 5, C), torch.randn(4, C, 3, 5), torch.randn(8, C)


class Own(nn.Module):
    """A norm of someone's own; its formula is given."""

    def __init__(self, function: Callable[[Own, Tensor], Tensor], *shape: int, **more: Any) -> None:
        super().__init__()
        self.p = nn.Parameter(0.5 + torch.rand(shape or (C,)))
        self.function = function
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def bare(function: Callable[[Own, Tensor], Tensor], **more: Any) -> Own:
    """A norm with no parameters but `more`."""
    norm = Own(function, **more)
    del norm.p
    return norm


def over(x: Tensor, *dims: int) -> Tensor:
    var, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
    return (x - mean) * (var + 1e-3).rsqrt()


def rms(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Film(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor, style: Tensor | str) -> Tensor:
        style = torch.ones(len(x), 1) if isinstance(style, str) else style
        return over(x, 0, 2, 3) * self.gain.view(-1, 1, 1) * style[..., None, None]


class Calling(nn.Module):
    """Calls its norm with further arguments."""

    def __init__(self, norm: nn.Module, *args: Any, **keywords: Any) -> None:
        super().__init__()
        self.inner, self.args, self.keywords = norm, args, keywords

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, *self.args, **self.keywords)
