from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from timm.layers.std_conv import ScaledStdConv2d, StdConv2d

from normexp.norms.parts import (
    WEIGHT_EPS,
    ScaledWeightStandardizedConv2d,
    WeightStandardizedConv2d,
)

BOTH = pytest.mark.parametrize("cls", [WeightStandardizedConv2d, ScaledWeightStandardizedConv2d])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def draw(cls, **knobs):
    """A convolution of 3 to 5 channels in float64 whose every parameter is drawn."""
    conv = cls(3, 5, 3, **knobs).double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_(std=0.2)
    return conv


def by_hand(conv: WeightStandardizedConv2d) -> torch.Tensor:
    """The filters from Python's sums over their 27 numbers."""
    filters = []
    for number, weight in enumerate(conv.weight.detach()):
        values = weight.flatten().tolist()
        mean = sum(values) / 27
        var = sum((value - mean) ** 2 for value in values) / 27
        scale = 1 / math.sqrt(var + WEIGHT_EPS)
        if isinstance(conv, ScaledWeightStandardizedConv2d):
            scale *= conv.gain[number].item() / math.sqrt(27)
        filters.append((weight - mean) * scale)
    return torch.stack(filters)


@BOTH
@pytest.mark.parametrize("knobs", [{}, {"stride": 2, "padding": 1, "bias": False}])
def test_convolution_takes_the_filters_of_the_formula(cls, knobs) -> None:
    conv, x = draw(cls, **knobs), torch.randn(2, 3, 8, 8, dtype=torch.double)
    stride, padding = knobs.get("stride", 1), knobs.get("padding", 0)
    expected = F.conv2d(x, by_hand(conv), conv.bias, stride, padding)
    torch.testing.assert_close(conv(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("cls", "peer"),
    [(WeightStandardizedConv2d, StdConv2d), (ScaledWeightStandardizedConv2d, ScaledStdConv2d)],
)
def test_convolution_is_timms(cls, peer) -> None:
    conv = draw(cls, padding=1)
    theirs = peer(3, 5, 3, padding=1, bias=True).double()
    state = conv.state_dict()
    if "gain" in state:
        state["gain"] = state["gain"].view(-1, 1, 1, 1)
    theirs.load_state_dict(state)
    x = torch.randn(2, 3, 8, 8, dtype=torch.double)
    torch.testing.assert_close(conv(x), theirs(x), rtol=0, atol=1e-10)


@BOTH
def test_scale_and_mean_of_a_stored_filter_have_no_effect(cls) -> None:
    conv, x = draw(cls), torch.randn(2, 3, 8, 8, dtype=torch.double)
    before = conv(x)
    with torch.no_grad():
        conv.weight.mul_(3).add_(0.5)
    torch.testing.assert_close(conv(x), before, rtol=1e-4, atol=1e-4)


def test_scaled_standardization_keeps_the_variance_of_white_inputs() -> None:
    conv = ScaledWeightStandardizedConv2d(64, 64, 3, padding=1, bias=False)
    out = conv(torch.randn(16, 64, 16, 16))[..., 1:-1, 1:-1]
    assert out.var().item() == pytest.approx(1, abs=0.05)


@BOTH
def test_gradients_of_standardised_filters_are_right(cls) -> None:
    conv, x = draw(cls), torch.randn(1, 3, 4, 4, dtype=torch.double)
    names = [name for name, _ in conv.named_parameters()]

    def run(*tensors):
        return torch.func.functional_call(conv, dict(zip(names, tensors, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, tuple(conv.parameters()))
