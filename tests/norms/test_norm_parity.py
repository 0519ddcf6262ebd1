"""Shipped norms compute what torch's, torchvision's and timm's own modules compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import timm.layers
import torch
import torchvision
from norm_cases import EPS, SHAPES, C, gradients, random_tensor, randomize
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.evonorm import EvoNormB0, EvoNormS0
from normexp.norms.filter_response import FilterResponseNorm
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d, PositionNorm
from normexp.norms.none import FrozenBatchNorm
from normexp.norms.rms import RMSNorm, SimpleRMSNorm

TOLERANCE = {torch.double: 1e-10, torch.float: 1e-5}
BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE_NORMS = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


class ChannelsLast(nn.Module):
    """Shows (N, *, C) to a norm; its state_dict is the norm's."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)

    def state_dict(self, *args, **kwargs):
        return self.norm.state_dict(*args, **kwargs)


def last(make: Callable[..., nn.Module], **knobs) -> nn.Module:
    return ChannelsLast(make(C, eps=EPS, **knobs))


# By name: our norm, and torch's for a number of dimensions.
TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[int], nn.Module]]] = {
    "batch": (lambda: BatchNorm(C, eps=EPS), lambda n: BATCH_NORMS[n](C, eps=EPS)),
    "batch_equal_weights": (
        lambda: BatchNorm(C, eps=EPS, momentum=None),
        lambda n: BATCH_NORMS[n](C, eps=EPS, momentum=None),
    ),
    "batch_untracked": (
        lambda: BatchNorm(C, eps=EPS, track_running_stats=False),
        lambda n: BATCH_NORMS[n](C, eps=EPS, track_running_stats=False),
    ),
    "batch_no_affine": (
        lambda: BatchNorm(C, eps=EPS, affine=False),
        lambda n: BATCH_NORMS[n](C, eps=EPS, affine=False),
    ),
    "layer": (
        lambda: LayerNorm(C, eps=EPS),
        lambda n: nn.LayerNorm(C, eps=EPS) if n == 2 else nn.GroupNorm(1, C, eps=EPS),
    ),
    "layer2d": (lambda: LayerNorm2d(C, eps=EPS), lambda _: last(nn.LayerNorm)),
    "position": (
        lambda: PositionNorm(C, eps=EPS),
        lambda _: last(nn.LayerNorm, elementwise_affine=False),
    ),
    "instance": (
        lambda: InstanceNorm(C, eps=EPS),
        lambda n: INSTANCE_NORMS[n](C, eps=EPS, affine=True),
    ),
    "group": (lambda: GroupNorm(C, num_groups=4, eps=EPS), lambda _: nn.GroupNorm(4, C, eps=EPS)),
    "rms": (lambda: RMSNorm(C, eps=EPS), lambda _: last(nn.RMSNorm)),
    "simple_rms": (
        lambda: SimpleRMSNorm(C, eps=EPS),
        lambda _: last(nn.RMSNorm, elementwise_affine=False),
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("name", TORCH)
def test_norm_equals_torch_over_steps(name, dtype):
    """Output, gradients, and state_dict with the same names; training and evaluation in turn."""
    close = partial(assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    make_ours, make_theirs = TORCH[name]
    for num_dims in (3, 4, 5) if name == "instance" else (2, 3, 4, 5):
        theirs, ours = randomize(make_theirs(num_dims).to(dtype)), make_ours().to(dtype)
        ours.load_state_dict(theirs.state_dict())  # strict
        for step, training in enumerate((True, True, False, True)):
            x = 2 * random_tensor(*SHAPES[num_dims], seed=step, dtype=dtype) + 1
            x.requires_grad_()
            out, expected = ours.train(training)(x), theirs.train(training)(x)
            close(out, expected)
            found = gradients(out, [x, *ours.parameters()])
            close(found, gradients(expected, [x, *theirs.parameters()]))
            close(ours.state_dict(), dict(theirs.state_dict()))


TIMM = {
    "group1": (partial(GroupNorm, num_groups=1), timm.layers.GroupNorm1),
    "frn": (FilterResponseNorm, partial(timm.layers.FilterResponseNormTlu2d, apply_act=False)),
    "evonorm_b0": (EvoNormB0, timm.layers.EvoNorm2dB0),
    "evonorm_s0": (partial(EvoNormS0, num_groups=4), partial(timm.layers.EvoNorm2dS0, groups=4)),
}


@pytest.mark.parametrize("name", TIMM)
def test_norm_equals_its_timm_counterpart(name):
    """In float32, which timm's statistics are in; output, gradients and state, over three steps."""
    ours, theirs = (randomize(make(C, eps=EPS)) for make in TIMM[name])
    extra = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not extra.unexpected_keys
    assert set(extra.missing_keys) <= {"running_mean", "num_batches_tracked"}
    close = partial(assert_close, rtol=1e-5, atol=1e-5)
    for step, training in enumerate([True, False, True]):
        x = (2 * random_tensor(*SHAPES[4], seed=step, dtype=torch.float) + 1).requires_grad_()
        out, expected = ours.train(training)(x), theirs.train(training)(x)
        close(out, expected)
        names = [key for key, _ in theirs.named_parameters()]
        found = gradients(out, [x, *(dict(ours.named_parameters())[key] for key in names)])
        close(found, gradients(expected, [x, *theirs.parameters()]))
        state = ours.state_dict()
        close({key: state[key] for key in theirs.state_dict()}, dict(theirs.state_dict()))


def test_frozen_equals_torchvision_and_takes_the_state_of_a_batch_norm():
    theirs = torchvision.ops.FrozenBatchNorm2d(C)
    trained, ours = randomize(nn.BatchNorm2d(C)), FrozenBatchNorm(C)
    theirs.load_state_dict(trained.state_dict())
    nn.Sequential(ours).load_state_dict(nn.Sequential(trained).state_dict())
    x = random_tensor(4, C, 3, 3, dtype=torch.float)
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)
    assert {name for name, _ in ours.named_parameters()} == {"weight", "bias"}


def test_group_norm_spans_layer_and_instance_norm():
    x = random_tensor(4, C, 3, 5)
    one, each = GroupNorm(C, num_groups=1).double(), GroupNorm(C, num_groups=C).double()
    assert_close(one(x), LayerNorm(C).double()(x), rtol=0, atol=1e-12)
    assert_close(each(x), InstanceNorm(C).double()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_features", "num_groups", "expected"),
    [(48, 32, 24), (48, 16, 16), (16, 32, 8), (7, 2, 1), (12, 5, 4), (1, 8, 1), (8, 8, 8)],
)
def test_nearest_policy_takes_and_logs_the_nearest_divisor(
    caplog, num_features, num_groups, expected
):
    with caplog.at_level(logging.INFO):
        norm = GroupNorm(num_features, num_groups=num_groups, groups_policy="nearest")
    assert norm.num_groups == expected
    assert len(caplog.messages) == (num_groups != expected)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_groups": 32}, "num_groups=32.*num_features=48.*num_groups=24 or 48"),
        ({"num_groups": 0}, "num_groups=0.*try norm.num_groups=1"),
        ({"num_groups": 2, "groups_policy": "gcd"}, "groups_policy=gcd.*strict.*nearest"),
    ],
)
def test_groups_that_do_not_fit_are_refused_with_what_does(knobs, message):
    with pytest.raises(UserError, match=message):
        GroupNorm(48, **knobs)


@pytest.mark.parametrize("shape", [(4, C), (4, C, 1, 1)])
def test_groups_of_one_value_are_refused(shape):
    for make in (GroupNorm, EvoNormS0):
        with pytest.raises(UserError, match=r"num_groups=8.*\(4, 8.*try"):
            make(C, num_groups=C)(torch.zeros(shape))


def test_learned_eps_of_filter_response_norm_admits_one_position_and_counts_by_its_size():
    norm = FilterResponseNorm(C, eps=1e-6, learn_eps=True).double()
    assert norm.learned_eps is not None
    out = norm(torch.full((4, C), 0.01, dtype=torch.double))
    assert_close(out, torch.full_like(out, 0.01 / (2e-4 + 1e-6) ** 0.5), rtol=1e-6, atol=0)
    nn.init.constant_(norm.learned_eps, -1e-4)
    assert_close(norm(torch.full((4, C), 0.01, dtype=torch.double)), out, rtol=1e-6, atol=0)
