"""Replacing the norms of a finished network, torchvision's among them."""

from __future__ import annotations

import logging

import pytest
import torch
import torchvision
from model_cases import layer_norm
from torch import nn

from normexp.errors import UserError
from normexp.models.surgery import ChannelsLast, replace_norms
from normexp.models.torchvision import adapt_channels, build_torchvision_model
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

LAYER_NORM = NormFactory(layer_norm)
BATCH_NORM = NormFactory(nn.BatchNorm2d)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each position of (N, C, *), with torchvision's eps."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def shape_at_norm(old: nn.Module, *shape: int) -> tuple[int, ...]:
    """What the new norm receives for an input of `shape` where `old` was."""
    shapes = []

    def make(num_features: int) -> nn.Module:
        norm = nn.Identity()
        norm.register_forward_hook(
            lambda _m, args, _o: shapes.append((num_features, *args[0].shape))
        )
        return norm

    network = nn.Sequential(nn.Sequential(old))
    replace_norms(network, NormFactory(make))
    assert not any(module is old for module in network.modules())
    assert network(torch.randn(shape)).shape == shape
    return shapes[0]


MAPS = {
    2: (2, 6),
    3: (2, 6, 3),
    4: (2, 6, 3, 4),
    5: (2, 6, 3, 4, 5),
}
OF_MAPS = [
    *((nn.BatchNorm1d(6), n) for n in (2, 3)),
    *((make(6), 4) for make in (nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d)),
    *((make(6), 3 + 2 * i) for i, make in enumerate((nn.InstanceNorm1d, nn.InstanceNorm3d))),
    (nn.BatchNorm3d(6), 5),
    (nn.GroupNorm(2, 6), 4),
    (torchvision.models.convnext.LayerNorm2d(6), 4),
]


@pytest.mark.parametrize(("old", "num_dims"), OF_MAPS)
def test_norm_of_maps_becomes_a_site_of_maps(old: nn.Module, num_dims: int) -> None:
    assert shape_at_norm(old, *MAPS[num_dims]) == (6, *MAPS[num_dims])


@pytest.mark.parametrize("old", [nn.LayerNorm(6), nn.RMSNorm(6)])
@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 6), (2, 3, 4, 6)])
def test_norm_of_the_last_axis_becomes_a_site_of_tokens(
    old: nn.Module, shape: tuple[int, ...]
) -> None:
    assert shape_at_norm(old, *shape) == (6, torch.Size(shape[:-1]).numel(), 6)
    x = torch.randn(shape)
    expected = nn.functional.layer_norm(x, (6,))
    torch.testing.assert_close(ChannelsLast(LAYER_NORM.tokens(6))(x), expected)


def test_a_norm_that_stands_in_two_places_becomes_one_site() -> None:
    shared = nn.BatchNorm2d(6)
    network = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    replace_norms(network, BATCH_NORM)
    assert network[0] is network[1][1] and [name for name, _ in named_sites(network)] == ["0"]


def test_layer_norm_over_several_axes_is_refused() -> None:
    with pytest.raises(UserError, match=r"LayerNorm\(\(3, 4\)"):
        replace_norms(nn.Sequential(nn.LayerNorm((3, 4))), LAYER_NORM)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_replacing_by_batch_norm_changes_no_number_no_name_and_no_order(name: str) -> None:
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(torchvision.models.get_model(name, weights=None, num_classes=7))
    original, replaced = networks
    replace_norms(replaced, BATCH_NORM)
    images = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)  # dropout
    expected = original(images)
    torch.manual_seed(1)
    assert torch.equal(replaced(images), expected)
    norms = [key for key, m in original.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert [key for key, _ in named_sites(replaced)] == norms
    keys = [key.replace(".norm.", ".") for key in replaced.state_dict()]
    assert keys == list(original.state_dict())


@pytest.mark.parametrize(
    ("name", "num_sites"),
    [pytest.param("vit_b_16", 25, marks=pytest.mark.slow), ("convnext_tiny", 23)],
)
def test_networks_with_layer_norms_compute_the_same(name: str, num_sites: int) -> None:
    torch.manual_seed(0)
    knobs = {"image_size": 32} if name == "vit_b_16" else {}
    original = torchvision.models.get_model(name, weights=None, num_classes=7, **knobs).eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = original(images)
        replace_norms(original, NormFactory(ChannelNorm))
        assert len(list(named_sites(original))) == num_sites
        torch.testing.assert_close(original(images), expected, rtol=0, atol=1e-5)


def test_torchvision_model_takes_grey_images_and_logs_its_sites(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="normexp"):
        model = build_torchvision_model(BATCH_NORM, (1, 32, 32), 7, name="resnet18")
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert "resnet18 has 20 sites: bn1, layer1.0.bn1, layer1.0.bn2," in caplog.text
    assert "1 channels instead of 3" in caplog.text


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_adapted_first_convolution_keeps_the_variance_of_its_output(channels: int) -> None:
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None)
    adapt_channels(network, channels)
    assert network.conv1.weight.shape == (64, channels, 7, 7)
    expected = 2 / (64 * 49) * 3 / channels  # torchvision: 2 / fan_out, for three channels
    assert network.conv1.weight.var().item() == pytest.approx(expected, rel=0.1)


def test_no_activation_works_in_place() -> None:
    """The gradient of tanh needs its output, which an activation in place would overwrite."""
    norm = NormFactory(lambda _: nn.Tanh())
    model = build_torchvision_model(norm, (3, 32, 32), 3, name="mobilenet_v2")
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet51", (3, 32, 32), "model.name=resnet51.*resnet50"),
        ("alexnet", (1, 8, 8), "model.name=alexnet.*1x8x8"),
        ("vit_b_16", (3, 30, 30), "model.name=vit_b_16.*3x30x30"),
    ],
)
def test_networks_that_cannot_be_built_are_refused(name: str, shape: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_torchvision_model(LAYER_NORM, shape, 3, name=name)
