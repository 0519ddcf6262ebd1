"""Slots and the parts that they name: activations, convolutions, residual scales."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from timm.layers.filter_response_norm import FilterResponseNormTlu2d
from timm.layers.std_conv import ScaledStdConv2d, StdConv2d
from torch import nn

from normexp.norms.factory import NormFactory
from normexp.norms.filter_response import FilterResponseNorm
from normexp.norms.parts import (
    ACTIVATIONS,
    TLU,
    WEIGHT_EPS,
    ResidualScale,
    ScaledReLU,
    ScaledWeightStandardizedConv2d,
    WeightStandardizedConv2d,
)
from normexp.norms.site import norm_parameters
from normexp.norms.slots import PLACES, SLOTS, Slots, changed, resolve, without_place

BOTH = pytest.mark.parametrize("cls", [WeightStandardizedConv2d, ScaledWeightStandardizedConv2d])


def test_config_wins_over_norm_and_null_leaves_the_word_to_the_next():
    of_norm = {"act": "tlu", "conv": "weight_standardized", "view": "token"}
    assert resolve({"act": "silu", "conv": None}, of_norm) == Slots("silu", "weight_standardized")
    assert resolve({key: None for key in SLOTS}, {}) == Slots()


def test_false_and_zero_are_values_and_not_null():
    of_norm = {"qk_norm": True, "residual_scale": 1.0}
    slots = resolve({"qk_norm": False, "residual_scale": 0}, of_norm)
    assert slots == Slots(residual_scale=0, qk_norm=False)


def test_only_used_values_unlike_the_default_make_another_training():
    slots = Slots(act="relu", conv="weight_standardized", residual_scale=0.0, placement="post")
    assert changed(slots, {"act", "conv", "residual_scale"}) == {
        "conv": "weight_standardized",
        "residual_scale": 0.0,
    }


def test_slots_that_were_set_and_not_used_are_found():
    config = {"act": "relu", "qk_norm": False, "placement": None, "lr": 0.1}
    assert without_place(config, {"act"}) == ["qk_norm"]
    assert set(PLACES) == set(SLOTS)


def test_factory_hands_out_what_its_slots_say_and_notes_what_was_asked():
    factory = NormFactory(nn.BatchNorm2d, slots=Slots(residual_scale=0.5, placement="peri"))
    assert factory.used == set()
    scale = factory.residual()
    assert torch.equal(scale(torch.full((2, 3), 4.0)), torch.full((2, 3), 2.0))
    assert factory.placement == "peri"
    assert factory.used == {"residual_scale", "placement"}


def test_unset_slots_are_torchs_own_modules():
    factory = NormFactory(nn.BatchNorm2d)
    assert type(factory.conv(3, 4, 3)) is nn.Conv2d
    assert type(factory.act(4)) is nn.ReLU
    assert type(factory.residual()) is nn.Identity
    assert factory.placement == "pre" and factory.qk_norm is False


def test_conv_of_a_factory_has_arguments_and_defaults_of_torch():
    torch.manual_seed(0)
    mine = NormFactory(nn.BatchNorm2d).conv(3, 4, 5, stride=2, padding=1)
    torch.manual_seed(0)
    theirs = nn.Conv2d(3, 4, 5, stride=2, padding=1)
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(mine(x), theirs(x))


def test_parameters_of_slots_count_as_those_of_norms():
    slots = Slots(act="tlu", conv="scaled_weight_standardized", residual_scale=0.0)
    factory = NormFactory(nn.BatchNorm2d, slots=slots)
    conv, act, residual = factory.conv(3, 4, 3), factory.act(4), factory.residual()
    model = nn.ModuleList([conv, factory(4), act, residual, nn.Linear(4, 2)])
    names = {id(p): name for name, p in model.named_parameters()}
    of_norms = {names[id(p)] for p in norm_parameters(model)}
    assert of_norms == {"0.gain", "1.norm.weight", "1.norm.bias", "2.tau", "3.scale"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_residual_scale_keeps_the_dtype(dtype: torch.dtype):
    x = torch.ones(2, 3, dtype=dtype)
    assert ResidualScale(0.5)(x).dtype == dtype


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 2)])
def test_tlu_is_the_larger_of_the_input_and_its_channels_threshold(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tlu, x = TLU(3), torch.randn(shape)
    with torch.no_grad():
        tlu.tau.copy_(torch.tensor([-0.5, 0.0, 0.7]))
    y = tlu(x)
    for channel, threshold in enumerate((-0.5, 0.0, 0.7)):
        expected = x[:, channel].clamp(min=threshold)
        assert torch.equal(y[:, channel], expected)


def test_tlu_of_bf16_is_the_float32_result_rounded() -> None:
    tlu, x = TLU(2), torch.tensor([[0.01, 30.25]], dtype=torch.bfloat16)
    with torch.no_grad():
        tlu.tau.fill_(-5.0)  # in bf16, 0.01 + 5 - 5 is 0
    assert torch.equal(tlu(x), x)


def test_tlu_passes_nan_on() -> None:
    assert TLU(1)(torch.tensor([[float("nan")]])).isnan().all()


def test_tlu_starts_as_relu_and_learns_where_it_clips() -> None:
    x = torch.tensor([[-1.0, 2.0], [-3.0, 4.0]])
    tlu = TLU(2)
    y = tlu(x)
    assert torch.equal(y, x.relu())
    y.sum().backward()
    assert tlu.tau.grad is not None
    assert tlu.tau.grad.tolist() == [2.0, 0.0]


def test_frn_and_tlu_are_timms_layer() -> None:
    torch.manual_seed(0)
    theirs = FilterResponseNormTlu2d(3, eps=1e-5)
    norm, tlu = FilterResponseNorm(3, eps=1e-5), TLU(3)
    with torch.no_grad():
        for mine, other in [
            (norm.weight, theirs.weight),
            (norm.bias, theirs.bias),
            (tlu.tau, theirs.tau),
        ]:
            assert mine is not None
            mine.copy_(torch.randn(3))
            other.copy_(mine)
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(tlu(norm(x)), theirs(x), rtol=0, atol=1e-5)


def test_scaled_relu_gives_standard_normal_inputs_variance_one() -> None:
    torch.manual_seed(0)
    assert ScaledReLU()(torch.randn(1_000_000)).var().item() == pytest.approx(1, abs=0.01)
    exact = math.sqrt(2 / (1 - 1 / math.pi))  # the variance of relu(x) is (1 - 1 / pi) / 2
    assert pytest.approx(exact, rel=1e-3) == ScaledReLU.GAIN


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_keeps_shape_and_dtype(name) -> None:
    x = torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)
    y = ACTIVATIONS[name](3)(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)


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
