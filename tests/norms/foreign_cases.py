"""What the tests of norms from the wild share."""

from __future__ import annotations

from functools import partial

import torch
from norm_cases import C
from torch import Tensor, nn

from normexp.norms.adapt import foreign_factory

EPS = 1e-3


class HiddenRMSNorm(nn.Module):
    """The form of language model libraries: `hidden_size`, and channels last."""

    def __init__(self, hidden_size: int, variance_epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        scale = hidden.square().mean(dim=-1, keepdim=True) + self.variance_epsilon
        return self.weight * hidden / scale.sqrt()


def build(make, **knobs) -> nn.Module:
    return foreign_factory(partial(make, **knobs), target="their.Norm", eps=EPS)(C).double()
