"""Norms of the zoo compute what torch's and timm's own modules compute, where they have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import timm.layers
import torch
from norm_cases import EPS, SHAPES, C, gradients, random_tensor, randomize
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.norms.evonorm import EvoNormB0, EvoNormS0
from normexp.norms.filter_response import FilterResponseNorm
from normexp.norms.group import GroupNorm, PositionNorm
from normexp.norms.rms import SimpleRMSNorm


def channels_last(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: norm(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("num_dims", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PositionNorm(C, eps=EPS), nn.LayerNorm(C, eps=EPS, elementwise_affine=False)),
        (SimpleRMSNorm(C, eps=EPS), nn.RMSNorm(C, eps=EPS, elementwise_affine=False)),
    ],
    ids=["position", "simple_rms"],
)
def test_norms_without_parameters_equal_torch(ours, theirs, num_dims):
    x = random_tensor(*SHAPES[num_dims]).requires_grad_()
    out, expected = ours(x), channels_last(theirs)(x)
    assert_close(out, expected, rtol=0, atol=1e-12)
    assert_close(gradients(out, [x]), gradients(expected, [x]), rtol=0, atol=1e-12)


TIMM = {
    "group1": (partial(GroupNorm, num_groups=1), timm.layers.GroupNorm1),
    "frn": (FilterResponseNorm, partial(timm.layers.FilterResponseNormTlu2d, apply_act=False)),
    "evonorm_b0": (EvoNormB0, timm.layers.EvoNorm2dB0),
    "evonorm_s0": (partial(EvoNormS0, num_groups=4), partial(timm.layers.EvoNorm2dS0, groups=4)),
    "evonorm_s0a": (partial(EvoNormS0, num_groups=4), partial(timm.layers.EvoNorm2dS0a, groups=4)),
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
        close({key: state[key] for key in theirs.state_dict()}, theirs.state_dict())
