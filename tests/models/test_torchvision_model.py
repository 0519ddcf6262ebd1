from __future__ import annotations

import logging

import pytest
import torch
import torchvision
from model_cases import PositionNorm
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from normexp.errors import UserError
from normexp.models import build_torchvision_model
from normexp.models.surgery import ChannelsLast, adapt_channels, find_norms, replace_norms
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

NORM = NormFactory(PositionNorm)
MAP_NORM = NormFactory(nn.BatchNorm2d)


def site_names(model: nn.Module) -> list[str]:
    return [name for name, _ in named_sites(model)]


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5"]
)
def test_sites_stand_where_torchvision_has_batch_norms(name: str) -> None:
    size = 64
    model = build_torchvision_model(NORM, (3, size, size), 7, name=name)
    original = torchvision.models.get_model(name, weights=None)
    assert site_names(model) == list(find_norms(original))
    assert not find_norms(model)


def test_replacing_by_batch_norm_changes_no_number() -> None:
    """The same seed gives torchvision's own output, through norm_layer and by replacement."""
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    original = torchvision.models.resnet18(weights=None, num_classes=7)
    torch.manual_seed(0)
    injected = torchvision.models.resnet18(weights=None, num_classes=7, norm_layer=MAP_NORM)
    torch.manual_seed(0)
    replaced = torchvision.models.resnet18(weights=None, num_classes=7)
    replace_norms(replaced, MAP_NORM)
    assert torch.equal(original(images), injected(images))
    assert torch.equal(original(images), replaced(images))


@pytest.mark.parametrize(("name", "num_sites"), [("vit_b_16", 25), ("convnext_tiny", 23)])
def test_sites_of_channels_last_networks_normalise_channels(name: str, num_sites: int) -> None:
    torch.manual_seed(0)
    model = build_torchvision_model(NORM, (3, 32, 32), 7, name=name).eval()
    torch.manual_seed(0)
    original = rebuild(name).eval()
    assert len(site_names(model)) == num_sites == len(find_norms(original))
    assert not find_norms(model)
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():  # eps is 1e-5 here and 1e-6 there
        torch.testing.assert_close(model(images), original(images), rtol=1e-2, atol=2e-3)


def rebuild(name: str) -> nn.Module:
    knobs = {"image_size": 32} if name.startswith("vit") else {}
    return torchvision.models.get_model(name, weights=None, num_classes=7, **knobs)


@pytest.mark.parametrize("shape", [(2, 8), (2, 3, 8), (2, 3, 4, 8)])
def test_channels_last_site_equals_layer_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    expected = nn.functional.layer_norm(x, (8,))
    torch.testing.assert_close(ChannelsLast(NORM.tokens(8))(x), expected)


def test_the_log_names_the_sites(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="normexp"):
        build_torchvision_model(MAP_NORM, (1, 32, 32), 7, name="resnet18")
    assert "resnet18 has 20 sites: bn1, layer1.0.bn1, layer1.0.bn2," in caplog.text
    assert "takes 1 channels in place of 3" in caplog.text


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_adapted_first_convolution_keeps_the_variance_of_its_output(channels: int) -> None:
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None)
    adapt_channels(network, channels)
    assert network.conv1.weight.shape == (64, channels, 7, 7)
    expected = 2 / (64 * 49) * 3 / channels  # torchvision: 2 / fan_out, for three channels
    assert network.conv1.weight.var().item() == pytest.approx(expected, rel=0.1)


def test_stacked_resnet18_equals_a_loop() -> None:
    torch.manual_seed(0)
    models = [
        build_torchvision_model(MAP_NORM, (1, 32, 32), 3, name="resnet18").double()
        for _ in range(2)
    ]
    images = torch.randn(2, 3, 1, 32, 32, dtype=torch.double)
    params, buffers = stack_module_state(models)

    def loss(own_params, own_buffers, own_images):
        out = functional_call(models[0], {**own_params, **own_buffers}, (own_images,))
        return out.square().mean()

    losses = vmap(loss)(params, buffers, images)
    losses.sum().backward()
    expected = torch.stack([m(x).square().mean() for m, x in zip(models, images, strict=True)])
    torch.testing.assert_close(losses, expected)
    expected.sum().backward()
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(params[name].grad[index], parameter.grad, msg=name)


class SavesItsOutput(nn.Module):
    """Its gradient needs its output, which an activation in place would overwrite."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def test_no_activation_works_in_place() -> None:
    norm = NormFactory(SavesItsOutput)
    model = build_torchvision_model(norm, (3, 32, 32), 3, name="mobilenet_v2")
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_unknown_name_is_refused_with_near_ones() -> None:
    with pytest.raises(UserError, match="model.name=resnet51 is no classifier.*try resnet50"):
        build_torchvision_model(NORM, (3, 32, 32), 3, name="resnet51")


def test_images_too_small_for_the_network_are_refused() -> None:
    with pytest.raises(UserError, match="model.name=alexnet cannot take images of 1x8x8"):
        build_torchvision_model(NORM, (1, 8, 8), 3, name="alexnet")


def test_images_that_the_patches_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="model.name=vit_b_16 cannot take images of 3x30x30"):
        build_torchvision_model(NORM, (3, 30, 30), 3, name="vit_b_16")
