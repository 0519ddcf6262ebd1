"""Slots: which value holds, what makes a training another one, what a factory hands out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normexp.norms.factory import NormFactory, ResidualScale
from normexp.norms.site import norm_parameters
from normexp.norms.slots import PLACES, SLOTS, Slots, changed, resolve, without_place


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
