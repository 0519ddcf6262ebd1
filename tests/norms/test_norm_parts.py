"""Slots and the parts that they name: activations, convolutions, residual scales."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from norm_cases import randomize
from timm.layers.filter_response_norm import FilterResponseNormTlu2d
from timm.layers.layer_scale import LayerScale2d
from timm.layers.std_conv import ScaledStdConv2d, StdConv2d
from torch import nn
from torch.testing import assert_close

from normexp.norms.factory import (
    ACTIVATIONS,
    TLU,
    NormFactory,
    ResidualScale,
    ScaledWeightStandardizedConv2d,
    WeightStandardizedConv2d,
)
from normexp.norms.site import norm_parameters
from normexp.norms.slots import PLACES, SLOTS, Slots, changed, resolve, set_but_unused
from normexp.norms.zoo.nonlinear import FilterResponseNorm


@pytest.mark.parametrize(
    ("asked", "of_norm", "expected"),
    [
        (
            {"act": "silu"},
            {"act": "tlu", "conv": "weight_standardized"},
            Slots(act="silu", conv="weight_standardized"),
        ),
        ({"conv": None}, {"conv": "plain", "view": "token"}, Slots()),
        (dict.fromkeys(SLOTS), {}, Slots()),
        # False and zero are values, and not null.
        ({"qk_norm": False, "residual_scale": 0}, {"qk_norm": True}, Slots(residual_scale=0)),
    ],
)
def test_config_wins_over_norm_and_null_leaves_the_word_to_the_next(asked, of_norm, expected):
    assert resolve(asked, of_norm) == expected


def test_only_used_values_unlike_the_default_make_another_training():
    slots = Slots(act="relu", conv="weight_standardized", residual_scale=0.0, placement="post")
    found = changed(slots, {"act", "conv", "residual_scale"})
    assert found == {"conv": "weight_standardized", "residual_scale": 0.0}


def test_slots_that_were_set_and_not_used_are_found():
    config = {"act": "relu", "qk_norm": False, "placement": None, "lr": 0.1}
    assert set_but_unused(config, {"act"}) == ["qk_norm"]
    assert set(PLACES) == set(SLOTS)


def test_a_branch_is_scaled_by_a_number_per_channel_as_in_timm_and_by_both_where_both_are_set():
    x = torch.randn(2, 3, 4, 4)
    factory = NormFactory(nn.BatchNorm2d, slots=Slots(layer_scale=0.1))
    ours = factory.residual(3, 1, 1)
    assert torch.equal(ours(x), LayerScale2d(3, init_values=0.1)(x))
    assert sum(p.numel() for p in ours.parameters()) == 3
    assert factory.used == {"residual_scale", "layer_scale"} and factory.placement == "pre"
    assert factory.used == {"residual_scale", "layer_scale", "placement"}
    both = NormFactory(nn.BatchNorm2d, slots=Slots(layer_scale=0.1, residual_scale=0.5))
    assert_close(both.residual(4)(x), 0.05 * x, rtol=0, atol=1e-7)


def test_unset_slots_are_torchs_own_modules():
    factory = NormFactory(nn.BatchNorm2d)
    conv = factory.conv(3, 4, 5, stride=2, padding=1)
    torch.manual_seed(0)
    theirs, x = nn.Conv2d(3, 4, 5, stride=2, padding=1), torch.randn(2, 3, 9, 9)
    assert type(conv) is nn.Conv2d and torch.equal(conv(x), theirs(x))
    assert type(factory.act(4)) is nn.ReLU and type(factory.residual()) is nn.Identity


def test_parameters_of_slots_count_as_those_of_norms():
    slots = Slots(act="tlu", conv="scaled_weight_standardized", residual_scale=0.0)
    factory = NormFactory(nn.BatchNorm2d, slots=slots)
    conv, act, residual = factory.conv(3, 4, 3), factory.act(4), factory.residual()
    model = nn.ModuleList([conv, factory(4), act, residual, nn.Linear(4, 2)])
    names = {id(p): name for name, p in model.named_parameters()}
    of_norms = {names[id(p)] for p in norm_parameters(model)}
    assert of_norms == {"0.gain", "1.norm.weight", "1.norm.bias", "2.tau", "3.scale"}


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5)])
def test_tlu_is_relu_at_first_and_keeps_a_nan(shape):
    tlu, x = TLU(3), torch.randn(shape)
    x[0, 0] = float("nan")
    assert torch.allclose(tlu(x), x.relu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "function"), [("proxy_relu", F.relu), ("proxy_silu", F.silu)])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5, 2)])
def test_proxy_activation_standardizes_by_an_integral_over_the_normal_density(
    name, function, shape
):
    act, x = ACTIVATIONS[name](3).double(), torch.randn(shape, dtype=torch.double)
    state = act.state_dict()
    for value in state.values():
        nn.init.normal_(value)
    g = torch.linspace(-9, 9, 200_001, dtype=torch.double)
    density = torch.exp(-(g**2) / 2) / math.sqrt(2 * math.pi) * (g[1] - g[0])
    for channel, out in enumerate(act(x).unbind(dim=1)):
        w, b = state["weight"][channel], state["bias"][channel]
        mean = (function(w * g + b) * density).sum()
        var = (function(w * g + b) ** 2 * density).sum() - mean**2
        expected = (function(w * x[:, channel] + b) - mean) / (var + 0.03) ** 0.5
        assert_close(out, expected, rtol=0, atol=0.01)  # 256 values for all of g


@pytest.mark.parametrize("name", [*ACTIVATIONS, "residual_scale"])
def test_part_keeps_shape_and_dtype(name):
    part = ResidualScale(0.5) if name == "residual_scale" else ACTIVATIONS[name](3)
    x = torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)
    assert (part(x).shape, part(x).dtype) == (x.shape, x.dtype)


STRIDED = {"stride": 2, "padding": 1, "bias": False}
# Ours, and timm's.
PEERS: list[tuple[nn.Module, nn.Module]] = [
    (nn.Sequential(FilterResponseNorm(3, eps=1e-5), TLU(3)), FilterResponseNormTlu2d(3, eps=1e-5)),
    *(
        (ours(3, 5, 3, **knobs), theirs(3, 5, 3, **{"bias": True, **knobs}))
        for ours, theirs in (
            (WeightStandardizedConv2d, StdConv2d),
            (ScaledWeightStandardizedConv2d, ScaledStdConv2d),
        )
        for knobs in ({"padding": 1}, STRIDED)
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), PEERS)
def test_part_is_timms(ours, theirs):
    randomize(theirs)
    names = {name.rpartition(".")[2]: name for name in ours.state_dict()}
    state = {names[name]: value for name, value in theirs.state_dict().items()}
    shapes = {name: value.shape for name, value in ours.state_dict().items()}
    ours.load_state_dict({name: value.view(shapes[name]) for name, value in state.items()})
    x = torch.randn(4, 3, 8, 8)
    assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
