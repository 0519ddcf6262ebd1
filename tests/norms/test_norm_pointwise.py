"""Small facts of single norms: what they begin as, what they are bounded by, what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from norm_cases import SHAPES, C, random_tensor, randomize
from torch import nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.filter_response import FilterResponseNorm
from normexp.norms.pointwise import Derf, DyT
from normexp.norms.rms import CRMSNorm, RMSNorm, ScaleNorm, SimpleRMSNorm


@pytest.mark.parametrize(("make", "function"), [(DyT, math.tanh), (Derf, math.erf)])
def test_pointwise_norms_begin_as_their_function_of_half_the_input(make, function):
    norm = make(1).double()
    for value in (-3.0, -0.1, 0.0, 0.7, 20.0):
        out = norm(torch.full((1, 1), value, dtype=torch.double))
        assert_close(out.item(), function(0.5 * value), rtol=0, atol=1e-15)


@pytest.mark.parametrize("make", [DyT, Derf])
def test_alpha_begins_where_it_is_told(make):
    assert make(C, alpha_init=0.2).alpha == torch.tensor(0.2)


@pytest.mark.parametrize("make", [DyT, Derf])
def test_pointwise_norms_act_on_each_value_by_itself(make):
    norm = randomize(make(C).double())
    x = random_tensor(2, C, 3)
    changed = x.clone()
    changed[0, 2, 1] += 1
    assert (norm(changed) != norm(x)).nonzero().tolist() == [[0, 2, 1]]


def test_scale_norm_begins_as_rms_norm_and_has_one_parameter():
    norm, x = ScaleNorm(C, eps=1e-3).double(), random_tensor(*SHAPES[4])
    assert_close(norm(x), RMSNorm(C, eps=1e-3).double()(x), rtol=0, atol=1e-6)
    (weight,) = norm.parameters()
    assert weight.shape == ()
    assert_close(weight.item(), math.sqrt(C), rtol=1e-6, atol=0)


def test_scale_norm_gives_every_position_the_same_length():
    norm = ScaleNorm(C, eps=1e-12).double()
    nn.init.constant_(norm.weight, 3.0)
    lengths = norm(random_tensor(*SHAPES[4])).square().sum(dim=1).sqrt()
    assert_close(lengths, torch.full_like(lengths, 3.0), rtol=0, atol=1e-9)


def test_simple_rms_norm_has_no_parameters():
    assert not list(SimpleRMSNorm(C).parameters())


def test_crms_norm_of_a_compressed_vector_is_layer_norm_compressed():
    """torch's layer norm of 9 channels of mean zero, of which the last is then left out."""
    whole = random_tensor(6, C + 1)
    whole = whole - whole.mean(dim=1, keepdim=True)
    expected = nn.LayerNorm(C + 1, eps=1e-3, elementwise_affine=False)(whole)[:, :C]
    assert_close(CRMSNorm(C, eps=1e-3).double()(whole[:, :C]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [DyT, Derf, CRMSNorm, FilterResponseNorm])
def test_without_affine_weight_is_one_and_bias_zero(make):
    bare, plain = make(C, affine=False), make(C)
    x = random_tensor(*SHAPES[4], dtype=torch.float)
    names = {name for name, _ in bare.named_parameters()}
    assert names.isdisjoint({"weight", "bias"})
    assert torch.equal(bare(x), plain(x))


@pytest.mark.parametrize("shape", [(4, C), (4, C, 1), (4, C, 1, 1)])
def test_filter_response_norm_refuses_one_position_unless_eps_is_learned(shape):
    with pytest.raises(UserError, match="needs positions to pool.*norm.learn_eps=true"):
        FilterResponseNorm(C)(torch.ones(shape))
    norm = FilterResponseNorm(C, eps=1e-6, learn_eps=True).double()
    out = norm(torch.full(shape, 0.01, dtype=torch.double))
    assert_close(out, torch.full_like(out, 0.01 / math.sqrt(1e-4 + 1e-6 + 1e-4)), rtol=1e-6, atol=0)


def test_learned_eps_counts_by_its_size():
    norm = FilterResponseNorm(C, learn_eps=True).double()
    assert norm.learned_eps is not None
    x = random_tensor(*SHAPES[4])
    nn.init.constant_(norm.learned_eps, 0.3)
    expected = norm(x)
    nn.init.constant_(norm.learned_eps, -0.3)
    assert_close(norm(x), expected, rtol=0, atol=0)
