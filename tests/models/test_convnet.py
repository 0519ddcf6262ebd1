from __future__ import annotations

import pytest
import torch
from torch import nn

from normexp.errors import UserError
from normexp.models import ConvNet
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

BATCH_NORM = NormFactory(nn.BatchNorm2d)


def map_sizes(model: nn.Module, image: torch.Tensor) -> list[tuple[int, ...]]:
    """Shape of the map at each site, in forward order."""
    sizes: list[tuple[int, ...]] = []
    for _, site in named_sites(model):
        site.register_forward_hook(lambda _module, args, _out: sizes.append(args[0].shape[1:]))
    model(image)
    return sizes


@pytest.mark.parametrize(
    ("size", "expected"), [(4, (4, 4, 4)), (8, (8, 4, 4)), (28, (28, 14, 7)), (32, (32, 16, 8))]
)
def test_only_maps_larger_than_4x4_are_halved(size: int, expected: tuple[int, ...]) -> None:
    model = ConvNet(BATCH_NORM, (2, size, size), 10, width=16)
    shapes = map_sizes(model, torch.randn(2, 2, size, size))
    assert shapes == [(c, s, s) for c, s in zip((16, 32, 32), expected, strict=True)]


def test_default_group_norm_pools_two_values_or_more_at_every_site_of_8x8_images() -> None:
    num_groups = 8
    model = ConvNet(NormFactory(lambda c: nn.GroupNorm(num_groups, c)), (1, 8, 8), 10, width=16)
    for channels, height, width in map_sizes(model, torch.randn(2, 1, 8, 8)):
        assert channels % num_groups == 0
        assert channels // num_groups * height * width >= 2


def test_convnet_parameter_count() -> None:
    model = ConvNet(BATCH_NORM, (1, 8, 8), 10, width=16)
    convs = 9 * (1 * 16 + 16 * 32 + 32 * 32)
    norms = 2 * (16 + 32 + 32)
    head = 32 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == convs + norms + head


def test_convnet_sites_are_named_by_role() -> None:
    model = ConvNet(BATCH_NORM, (3, 32, 32), 10, width=16)
    assert [name for name, _ in named_sites(model)] == ["norm1", "norm2", "norm3"]


def test_convnet_refuses_images_below_4x4() -> None:
    with pytest.raises(UserError, match="images of 3x8 are too small for model=convnet"):
        ConvNet(BATCH_NORM, (3, 3, 8), 10, width=16)
