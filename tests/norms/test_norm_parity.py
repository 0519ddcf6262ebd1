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
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d, PositionNorm
from normexp.norms.mixtures import BatchChannelNorm, EvoNormB0, EvoNormS0, ModeNorm
from normexp.norms.pointwise import FrozenBatchNorm
from normexp.norms.rms import FilterResponseNorm, GlobalResponseNorm, RMSNorm, SimpleRMSNorm

TOLERANCE = {torch.double: 1e-10, torch.float: 1e-5}
BATCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


class ChannelsLast(nn.Module):
    """Shows (N, *, C) to a norm; its state_dict is the norm's."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)

    def state_dict(self, *args, **kwargs):
        return self.norm.state_dict(*args, **kwargs)


def last(make: Callable[..., nn.Module], _: int, **knobs) -> nn.Module:
    return ChannelsLast(make(C, **knobs))


def by_dims(makes, num_dims: int, **knobs) -> nn.Module:
    return makes[num_dims](C, **knobs)


def layer_norm(num_dims: int, **knobs) -> nn.Module:
    return nn.LayerNorm(C, **knobs) if num_dims == 2 else nn.GroupNorm(1, C, **knobs)


BATCH_KNOBS = {"momentum": None}, {"track_running_stats": False}, {"affine": False}, {}
BARE = {"elementwise_affine": False}
# Ours, and theirs for a number of dimensions.
TORCH: list[tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = [
    *((partial(BatchNorm, **knobs), partial(by_dims, BATCH, **knobs)) for knobs in BATCH_KNOBS),
    (LayerNorm, layer_norm),
    (LayerNorm2d, partial(last, nn.LayerNorm)),
    (PositionNorm, partial(last, nn.LayerNorm, **BARE)),
    (InstanceNorm, partial(by_dims, INSTANCE, affine=True)),
    (partial(GroupNorm, num_groups=4), lambda _, **knobs: nn.GroupNorm(4, C, **knobs)),
    (RMSNorm, partial(last, nn.RMSNorm)),
    (SimpleRMSNorm, partial(last, nn.RMSNorm, **BARE)),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize(("ours", "theirs"), TORCH)
def test_norm_equals_torch_over_steps(ours, theirs, dtype):
    """Output, gradients, and state_dict with the same names; training and evaluation in turn."""
    close = partial(assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for num_dims in (3, 4, 5) if ours is InstanceNorm else (2, 3, 4, 5):
        norm, reference = ours(C, eps=EPS).to(dtype), randomize(theirs(num_dims, eps=EPS).to(dtype))
        norm.load_state_dict(reference.state_dict())  # strict
        for step, training in enumerate((True, True, False, True)):
            x = 2 * random_tensor(*SHAPES[num_dims], seed=step, dtype=dtype) + 1
            x.requires_grad_()
            out, expected = norm.train(training)(x), reference.train(training)(x)
            close(out, expected)
            found = gradients(out, [x, *norm.parameters()])
            close(found, gradients(expected, [x, *reference.parameters()]))
            close(norm.state_dict(), dict(reference.state_dict()))


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


def test_global_response_norm_is_timms():
    theirs, ours = randomize(timm.layers.grn.GlobalResponseNorm(C)), GlobalResponseNorm(C, eps=1e-6)
    names = {"weight": "response", "bias": "shift"}
    ours.load_state_dict({names[key]: value for key, value in theirs.state_dict().items()})
    x = random_tensor(*SHAPES[4], dtype=torch.float)
    assert_close(ours(x), theirs(x.movedim(1, -1)).movedim(-1, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", [LayerNorm, LayerNorm2d, RMSNorm])
def test_a_zero_centered_weight_is_the_weight_less_one(cls):
    plain = randomize(cls(C).double())
    centred = cls(C, zero_centered=True).double()
    x = random_tensor(*SHAPES[3]).requires_grad_()
    assert not centred.weight.any() and torch.equal(centred(x), cls(C).double()(x))
    centred.load_state_dict({**plain.state_dict(), "weight": plain.weight.detach() - 1})
    found = [gradients(norm(x), [x, *norm.parameters()]) for norm in (plain, centred)]
    assert_close(*found, rtol=0, atol=1e-12)


def test_mode_norm_with_one_mode_and_batch_channel_norm_at_its_ends_are_norms_known_before():
    x = random_tensor(*SHAPES[4])
    assert_close(ModeNorm(C, num_modes=1).double()(x), BatchNorm(C).double()(x), rtol=0, atol=1e-12)
    mixed = BatchChannelNorm(C).double()
    for rho, known in ((1.0, BatchNorm), (0.0, LayerNorm)):
        nn.init.constant_(mixed.gate, rho)
        assert_close(mixed(x), known(C).double()(x), rtol=0, atol=1e-12)


def test_frozen_equals_torchvision_and_takes_the_state_of_a_batch_norm():
    theirs = torchvision.ops.FrozenBatchNorm2d(C)
    trained, ours = randomize(nn.BatchNorm2d(C)), FrozenBatchNorm(C)
    theirs.load_state_dict(trained.state_dict())
    nn.Sequential(ours).load_state_dict(nn.Sequential(trained).state_dict())
    x = random_tensor(4, C, 3, 3, dtype=torch.float)
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)
    assert {name for name, _ in ours.named_parameters()} == {"weight", "bias"}


ULP = 4.8e-7  # of a float32 near 4, about the largest output
# Ours and torch's.
FAR: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "batch": (lambda: BatchNorm(C), lambda: nn.BatchNorm2d(C)),
    "instance": (lambda: InstanceNorm(C), lambda: nn.InstanceNorm2d(C, affine=True)),
    "layer": (lambda: LayerNorm(C), lambda: nn.GroupNorm(1, C)),
    "group": (lambda: GroupNorm(C, num_groups=4), lambda: nn.GroupNorm(4, C)),
    "layer2d": (lambda: LayerNorm2d(C), lambda: ChannelsLast(nn.LayerNorm(C))),
}


@pytest.mark.parametrize("mean", [0, 1e2, 1e4])
@pytest.mark.parametrize("name", FAR)
def test_float32_far_from_zero_is_as_exact_as_torchs(name, mean):
    """Largest errors against float64, of outputs and of gradients of the input."""
    errors = []
    for make in FAR[name]:
        x = (random_tensor(8, C, 16, 16) + mean).float().requires_grad_()
        wide = x.detach().double().requires_grad_()
        out, exact = make()(x), make().double()(wide)
        (grad,), (exact_grad,) = gradients(out, [x]), gradients(exact, [wide])
        errors.append([(out - exact).abs().max().item(), (grad - exact_grad).abs().max().item()])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 1.1 * theirs + ULP


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
@pytest.mark.parametrize("make", [GroupNorm, EvoNormS0])
def test_groups_of_one_value_are_refused(make, shape):
    with pytest.raises(UserError, match=r"num_groups=8.*\(4, 8.*try"):
        make(C, num_groups=C)(torch.zeros(shape))


@pytest.mark.parametrize("learned", [1e-4, -1e-4])
def test_learned_eps_of_filter_response_norm_admits_one_position_and_counts_by_its_size(learned):
    norm = FilterResponseNorm(C, eps=1e-6, learn_eps=True).double()
    nn.init.constant_(norm.learned_eps, learned)
    x = torch.full((4, C), 0.01, dtype=torch.double)
    assert_close(norm(x), x / (2e-4 + 1e-6) ** 0.5, rtol=1e-6, atol=0)
