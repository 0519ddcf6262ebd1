from __future__ import annotations

import pytest
import torch
from model_cases import PositionNorm
from torch import nn

from normexp.errors import UserError
from normexp.models import ResNet
from normexp.models.resnet import ResidualBlock
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

BATCH_NORM = NormFactory(nn.BatchNorm2d)


def expected_parameters(depth: int, width: int, channels: int, num_outputs: int) -> int:
    """3x3 convolutions without bias, two numbers per normalised channel, a head with bias."""
    num_blocks = (depth - 2) // 6
    total = 9 * channels * width + 2 * width
    before = width
    for stage_width in (width, 2 * width, 4 * width):
        convs = 9 * before * stage_width + 9 * stage_width**2 * (2 * num_blocks - 1)
        total += convs + 2 * stage_width * 2 * num_blocks
        before = stage_width
    return total + 4 * width * num_outputs + num_outputs


@pytest.mark.parametrize("depth", [8, 20, 32, 44, 56, 110])
def test_resnet_parameter_count(depth: int) -> None:
    model = ResNet(BATCH_NORM, (3, 32, 32), 10, depth=depth, width=16)
    count = sum(p.numel() for p in model.parameters())
    assert count == expected_parameters(depth, 16, 3, 10)
    if depth == 20:
        assert count == 269_722  # table 6 of the paper: 0.27M


def test_resnet_has_as_many_weight_layers_as_its_depth() -> None:
    model = ResNet(BATCH_NORM, (3, 32, 32), 10, depth=20, width=16)
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == 20


def test_resnet_sites_are_named_by_role() -> None:
    model = ResNet(BATCH_NORM, (1, 8, 8), 10, depth=8, width=8)
    blocks = [f"stage{stage}.0.{role}" for stage in (1, 2, 3) for role in ("norm1", "norm2")]
    assert [name for name, _ in named_sites(model)] == ["stem_norm", *blocks]


def test_shortcut_takes_every_second_position_and_adds_zero_channels() -> None:
    block = ResidualBlock(2, 4, 2, NormFactory(lambda _: nn.Identity()))
    x = torch.randn(3, 2, 5, 5)
    expected = torch.zeros(3, 4, 3, 3)
    expected[:, :2] = x[:, :, ::2, ::2]
    assert torch.equal(block.shortcut(x), expected)


def test_residual_block_with_a_silent_branch_is_the_identity() -> None:
    block = ResidualBlock(8, 8, 1, NormFactory(PositionNorm))
    nn.init.zeros_(block.norm2.get_parameter("norm.weight"))
    x = torch.rand(2, 8, 4, 4)
    assert torch.equal(block(x), x)


def test_convolutions_start_with_variance_two_over_fan_in() -> None:
    torch.manual_seed(0)
    model = ResNet(BATCH_NORM, (3, 32, 32), 10, depth=8, width=64)
    weight = model.get_parameter("stage3.0.conv2.weight")
    assert weight.var().item() == pytest.approx(2 / (256 * 9), rel=0.01)


@pytest.mark.parametrize("depth", [2, 18, 21])
def test_depth_other_than_6n_plus_2_is_refused(depth: int) -> None:
    with pytest.raises(UserError, match=f"depth={depth} is not 6n \\+ 2"):
        ResNet(BATCH_NORM, (3, 32, 32), 10, depth=depth, width=16)


def test_images_that_end_as_one_position_are_refused() -> None:
    with pytest.raises(UserError, match="images of 4x4 are too small for model=resnet"):
        ResNet(BATCH_NORM, (3, 4, 4), 10, depth=8, width=16)


def test_sequences_are_refused() -> None:
    with pytest.raises(UserError, match="takes images"):
        ResNet(BATCH_NORM, (64,), 10, depth=8, width=16)
