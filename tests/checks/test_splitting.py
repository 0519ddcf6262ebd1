from __future__ import annotations

import pytest
import torch
from torch import nn

from normexp.batching.sizes import Sizes
from normexp.checks.splitting import check_split
from normexp.errors import UserError
from normexp.norms.factory import NormFactory


class Streaming(nn.Module):
    sequential_state = True

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))

    def forward(self, x):
        return x


def network(norm: type[nn.Module]) -> nn.Module:
    return nn.ModuleDict({"norm1": NormFactory(norm)(4)})


@pytest.mark.parametrize("sizes", [Sizes(8, 4), Sizes(8, None, 2)], ids=["accumulated", "ghost"])
def test_sequential_state_is_refused_where_a_step_is_split(sizes: Sizes):
    with pytest.raises(UserError, match="norm at norm1 is sequential; try .*=null"):
        check_split(network(Streaming), sizes)


def test_sequential_state_is_fine_in_one_part():
    check_split(network(Streaming), Sizes(8))
    check_split(network(nn.BatchNorm1d), Sizes(8, 4))
