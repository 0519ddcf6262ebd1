"""Each shipped norm is its textbook formula, written out over plain axes."""

from __future__ import annotations

import pytest
import torch
from norm_cases import CASES, CASES_AND_DIMS, EPS, SHAPES, C, random_tensor, randomize
from torch import Tensor
from torch.testing import assert_close


def standardize(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """(x - mean) / sqrt(var + eps), the moments sums over `axes` by their number of values."""
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    mean = sum_over(x, axes) / count
    var = sum_over((x - mean) ** 2, axes) / count
    return (x - mean) / (var + EPS) ** 0.5


def sum_over(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.sum(dim=axes, keepdim=True)


def textbook(name: str, x: Tensor) -> Tensor:
    """What the norm pools, before weight and bias; x (N, C, *)."""
    positions = tuple(range(2, x.ndim))
    if name == "batch":
        return standardize(x, (0, *positions))
    if name == "layer":
        return standardize(x, (1, *positions))
    if name == "layer2d":
        return standardize(x, (1,))
    if name == "instance":
        return standardize(x, positions)
    if name == "group":  # four groups of two neighbouring channels
        groups = [standardize(x[:, i : i + 2], (1, *positions)) for i in (0, 2, 4, 6)]
        return torch.cat(groups, dim=1)
    if name == "rms":
        return x / (sum_over(x**2, (1,)) / C + EPS) ** 0.5
    return x


@pytest.mark.parametrize(("name", "num_dims"), CASES_AND_DIMS)
def test_norm_is_its_textbook_formula(name, num_dims):
    norm = randomize(CASES[name].make().double())
    x = random_tensor(*SHAPES[num_dims]) * 3 - 1
    channels = (1, C, *[1] * (num_dims - 2))
    expected = textbook(name, x)
    state = dict(norm.named_parameters())
    if "weight" in state:
        expected = expected * state["weight"].view(channels)
    if "bias" in state:
        expected = expected + state["bias"].view(channels)
    assert_close(norm(x), expected, rtol=0, atol=1e-12)
