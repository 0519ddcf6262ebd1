"""Shipped norms compute what torch's, torchvision's and timm's own modules compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm.layers
import torch
import torchvision
from norm_cases import EPS, SHAPES, C, gradients, random_tensor, randomize
from timm.layers.grn import GlobalResponseNorm as TimmGlobalResponseNorm
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d, PositionNorm
from normexp.norms.mixtures import EvoNormB0, EvoNormS0
from normexp.norms.pointwise import FrozenBatchNorm
from normexp.norms.rms import FilterResponseNorm, GlobalResponseNorm, RMSNorm, SimpleRMSNorm

Make = Callable[..., nn.Module]
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


def last(make: Make, _: int, **knobs) -> nn.Module:
    return ChannelsLast(make(C, **knobs))


def by_dims(makes: dict[int, Make], num_dims: int, **knobs) -> nn.Module:
    return makes[num_dims](C, **knobs)


def layer_norm(num_dims: int, **knobs) -> nn.Module:
    return nn.LayerNorm(C, **knobs) if num_dims == 2 else nn.GroupNorm(1, C, **knobs)


def of_maps(make: Make) -> Make:
    """As timm's, whose statistics are in float32."""
    return lambda _, **knobs: make(C, **knobs)


BARE = {"elementwise_affine": False}
BATCH_KNOBS: tuple[dict[str, Any], ...] = (
    *({"momentum": None}, {"track_running_stats": False}, {"affine": False}, {}),
)
FRN = partial(timm.layers.FilterResponseNormTlu2d, apply_act=False)
ALL_DIMS, MAPS = (2, 3, 4, 5), (4,)
# Ours, theirs for a number of dimensions, and these numbers.
PAIRS: list[tuple[Make, Make, tuple[int, ...]]] = [
    *((partial(BatchNorm, **own), partial(by_dims, BATCH, **own), ALL_DIMS) for own in BATCH_KNOBS),
    (LayerNorm, layer_norm, ALL_DIMS),
    (LayerNorm2d, partial(last, nn.LayerNorm), ALL_DIMS),
    (PositionNorm, partial(last, nn.LayerNorm, **BARE), ALL_DIMS),
    (InstanceNorm, partial(by_dims, INSTANCE, affine=True), (3, 4, 5)),
    (partial(GroupNorm, num_groups=4), lambda _, **own: nn.GroupNorm(4, C, **own), ALL_DIMS),
    (RMSNorm, partial(last, nn.RMSNorm), ALL_DIMS),
    (SimpleRMSNorm, partial(last, nn.RMSNorm, **BARE), ALL_DIMS),
    (FrozenBatchNorm, of_maps(torchvision.ops.FrozenBatchNorm2d), MAPS),
    (partial(GroupNorm, num_groups=1), of_maps(timm.layers.GroupNorm1), MAPS),
    (FilterResponseNorm, of_maps(FRN), MAPS),
    (EvoNormB0, of_maps(timm.layers.EvoNorm2dB0), MAPS),
    (partial(EvoNormS0, num_groups=4), of_maps(partial(timm.layers.EvoNorm2dS0, groups=4)), MAPS),
]


@pytest.mark.parametrize(("ours", "theirs", "dims"), PAIRS)
def test_norm_equals_theirs_over_steps(ours, theirs, dims):
    """Output, gradients, and state_dict with the same names; training and evaluation in turn."""
    dtype, tolerance = (torch.double, 1e-10) if len(dims) > 1 else (torch.float, 1e-5)
    close = partial(assert_close, rtol=tolerance, atol=tolerance)
    for num_dims in dims:
        norm, reference = ours(C, eps=EPS).to(dtype), randomize(theirs(num_dims, eps=EPS).to(dtype))
        missing, unexpected = norm.load_state_dict(reference.state_dict(), strict=False)
        assert not unexpected and not (missing and dims != MAPS)
        assert set(missing) <= {"running_mean", "num_batches_tracked"}
        names = [name for name, _ in reference.named_parameters()]
        for step, training in enumerate((True, True, False, True)):
            x = 2 * random_tensor(*SHAPES[num_dims], seed=step, dtype=dtype) + 1
            x.requires_grad_()
            out, expected = norm.train(training)(x), reference.train(training)(x)
            close(out, expected)
            own = dict(norm.named_parameters())
            found = gradients(out, [x, *(own[name.removeprefix("norm.")] for name in names)])
            close(found, gradients(expected, [x, *reference.parameters()]))
            state = norm.state_dict()
            close({key: state[key] for key in reference.state_dict()}, reference.state_dict())


def test_global_response_norm_is_timms():
    theirs, ours = randomize(TimmGlobalResponseNorm(C)), GlobalResponseNorm(C, eps=1e-6)
    names = {"weight": "response", "bias": "shift"}
    ours.load_state_dict({names[key]: value for key, value in theirs.state_dict().items()})
    x = random_tensor(*SHAPES[4], dtype=torch.float)
    assert_close(ours(x), theirs(x.movedim(1, -1)).movedim(-1, 1), rtol=0, atol=1e-5)


def test_frozen_batch_norm_takes_the_state_of_a_batch_norm_and_learns_weight_and_bias():
    trained, ours = randomize(nn.BatchNorm2d(C)), FrozenBatchNorm(C)
    nn.Sequential(ours).load_state_dict(nn.Sequential(trained).state_dict())
    x = random_tensor(4, C, 3, 3, dtype=torch.float)
    assert_close(ours(x), trained.eval()(x), rtol=0, atol=1e-6)
    assert {name for name, _ in ours.named_parameters()} == {"weight", "bias"}


@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm])
def test_a_zero_centered_weight_is_the_weight_less_one(cls):
    plain = randomize(cls(C).double())
    centred = cls(C, zero_centered=True).double()
    x = random_tensor(*SHAPES[3]).requires_grad_()
    assert not centred.weight.any() and torch.equal(centred(x), cls(C).double()(x))
    centred.load_state_dict({**plain.state_dict(), "weight": plain.weight.detach() - 1})
    found = [gradients(norm(x), [x, *norm.parameters()]) for norm in (plain, centred)]
    assert_close(*found, rtol=0, atol=1e-12)


ULP = 4.8e-7  # of a float32 near 4, about the largest output


@pytest.mark.parametrize("mean", [0, 1e2, 1e4])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (BatchNorm, nn.BatchNorm2d),
        (InstanceNorm, partial(nn.InstanceNorm2d, affine=True)),
        (LayerNorm, partial(nn.GroupNorm, 1)),
        (partial(GroupNorm, num_groups=4), partial(nn.GroupNorm, 4)),
        (LayerNorm2d, partial(last, nn.LayerNorm)),
    ],
)
def test_float32_far_from_zero_is_as_exact_as_torchs(ours, theirs, mean):
    """Largest errors against float64, of outputs and of gradients of the input."""
    errors = []
    for make in (ours, theirs):
        x = (random_tensor(8, C, 16, 16) + mean).float().requires_grad_()
        wide = x.detach().double().requires_grad_()
        out, exact = make(C)(x), make(C).double()(wide)
        (grad,), (exact_grad,) = gradients(out, [x]), gradients(exact, [wide])
        errors.append([(out - exact).abs().max().item(), (grad - exact_grad).abs().max().item()])
    for own, other in zip(*errors, strict=True):
        assert own <= 1.1 * other + ULP


@pytest.mark.parametrize(
    ("num_features", "num_groups", "expected"),
    [(48, 32, 24), (48, 16, 16), (16, 32, 8), (12, 5, 4), (1, 8, 1)],
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


@pytest.mark.parametrize("make", [GroupNorm, EvoNormS0])
def test_groups_of_one_value_are_refused(make):
    with pytest.raises(UserError, match=r"num_groups=8.*\(4, 8, 1, 1\).*try"):
        make(C, num_groups=C)(torch.zeros(4, C, 1, 1))


@pytest.mark.parametrize("learned", [1e-4, -1e-4])
def test_learned_eps_of_filter_response_norm_admits_one_position_and_counts_by_its_size(learned):
    norm = FilterResponseNorm(C, eps=1e-6, learn_eps=True).double()
    assert norm.learned_eps is not None
    nn.init.constant_(norm.learned_eps, learned)
    x = torch.full((4, C), 0.01, dtype=torch.double)
    assert_close(norm(x), x / (2e-4 + 1e-6) ** 0.5, rtol=1e-6, atol=0)
