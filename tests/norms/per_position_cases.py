"""What the tests of batch norm per position share."""

from __future__ import annotations

import torch
from norm_cases import EPS, C, randomize
from torch import Tensor

from normexp.norms.per_position import BatchNormPerPosition

N, T = 11, 5


def make() -> BatchNormPerPosition:
    return BatchNormPerPosition(C, num_positions=T, eps=EPS)


def make_random() -> BatchNormPerPosition:
    return randomize(make().double())


def padded() -> Tensor:
    """Texts of 1 to T tokens: all begin, few go on to the end."""
    lengths = 1 + torch.arange(N) % T
    mask = torch.arange(T) < lengths[:, None]
    mask[5:, 4] = False  # one text alone reaches the last position
    return mask
