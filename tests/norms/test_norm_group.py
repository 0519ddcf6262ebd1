"""Group norm: groups that do not divide, and group norm as layer and instance norm."""

from __future__ import annotations

import logging

import pytest
import torch
from norm_cases import C, random_tensor
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, fit_groups


def test_groups_that_do_not_divide_are_refused_with_the_nearest_that_do():
    expected = (
        "num_groups=32 does not divide num_features=48; "
        "try norm.num_groups=24 or 48, or norm.groups_policy=nearest"
    )
    with pytest.raises(UserError) as caught:
        GroupNorm(48, num_groups=32)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("num_features", "num_groups", "expected"),
    [(48, 32, 24), (48, 16, 16), (16, 32, 8), (7, 2, 1), (12, 5, 4), (1, 8, 1), (8, 8, 8)],
)
def test_nearest_policy_takes_the_nearest_divisor_below_all_channels(
    num_features, num_groups, expected
):
    assert fit_groups(num_features, num_groups, "nearest") == expected


def test_nearest_policy_logs_what_it_takes(caplog):
    with caplog.at_level(logging.INFO):
        norm = GroupNorm(48, num_groups=32, groups_policy="nearest")
    assert norm.num_groups == 24
    assert caplog.messages == ["num_groups=32 does not divide num_features=48: using 24"]


@pytest.mark.parametrize("num_groups", [0, -4])
def test_a_number_of_groups_that_is_not_positive_is_refused(num_groups):
    with pytest.raises(UserError, match=f"num_groups={num_groups} is not positive"):
        GroupNorm(C, num_groups=num_groups)


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match="groups_policy=gcd is neither strict nor nearest"):
        GroupNorm(C, num_groups=2, groups_policy="gcd")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(4, C), (4, C, 1, 1)])
def test_groups_of_one_value_are_refused(shape):
    with pytest.raises(UserError, match="num_groups=8 leaves one value per group"):
        GroupNorm(C, num_groups=C)(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(4, C), (4, C, 1, 1)])
def test_instance_norm_without_positions_is_refused(shape):
    with pytest.raises(UserError, match="instance norm needs positions"):
        InstanceNorm(C).eval()(torch.zeros(shape))


def test_group_norm_spans_layer_and_instance_norm():
    x = random_tensor(4, C, 3, 5)
    one, all_channels = GroupNorm(C, num_groups=1).double(), GroupNorm(C, num_groups=C).double()
    assert_close(one(x), LayerNorm(C).double()(x), rtol=0, atol=1e-12)
    assert_close(all_channels(x), InstanceNorm(C).double()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", [GroupNorm(C, num_groups=2), LayerNorm(C), InstanceNorm(C)])
def test_a_sample_is_normalized_alike_whatever_its_batch(norm):
    x = random_tensor(4, C, 3, 5)
    assert_close(norm.double()(x)[1:2], norm(x[1:2]), rtol=0, atol=1e-14)
