"""Norms against torch's own, step by step and far from zero; parts of slots against timm's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from norm_cases import EPS, SHAPES, C, gradients, make, random_tensor, randomize
from timm.layers.filter_response_norm import FilterResponseNormTlu2d
from timm.layers.layer_scale import LayerScale2d
from timm.layers.std_conv import ScaledStdConv2d, StdConv2d
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm, FrozenBatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.parts import (
    ACTIVATIONS,
    TLU,
    ResidualScale,
    ScaledWeightStandardizedConv2d,
    WeightStandardizedConv2d,
)
from normexp.norms.sample import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d, RMSNorm
from normexp.norms.sequence import BatchNormPerPosition
from normexp.norms.site import norm_parameters
from normexp.norms.zoo.nonlinear import FilterResponseNorm
from normexp.training.config.slots import PLACES, SLOTS, Slots, resolve, set_but_unused

BATCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class ChannelsLast(nn.LayerNorm):
    """torch's layer norm of (N, *, C), shown (N, C, *)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


close = partial(assert_close, rtol=1e-10, atol=1e-10)


def alike_over_steps(
    norm: nn.Module, reference: nn.Module, num_dims: int
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Both from one state, in training and evaluation in turn: outputs and gradients are equal.

    Yields the state of each after every step.
    """
    reference = randomize(reference.double())
    norm = norm.double()
    norm.load_state_dict(reference.state_dict())
    for step, training in enumerate((True, True, False, True)):
        x = 2 * random_tensor(*SHAPES[num_dims], seed=step) + 1
        x.requires_grad_()
        out, expected = norm.train(training)(x), reference.train(training)(x)
        close(out, expected)
        found = gradients(out, [x, *norm.parameters()])
        close(found, gradients(expected, [x, *reference.parameters()]))
        yield dict(norm.state_dict()), dict(reference.state_dict())


@pytest.mark.parametrize(
    "knobs", [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}]
)
def test_batch_norm_equals_torchs_over_steps(knobs):
    for num_dims, theirs in BATCH.items():
        norm, reference = BatchNorm(C, eps=EPS, **knobs), theirs(C, eps=EPS, **knobs)
        for state, expected in alike_over_steps(norm, reference, num_dims):
            close(state, expected)


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
        (LayerNorm2d, ChannelsLast),
    ],
)
def test_float32_far_from_zero_is_as_exact_as_torchs(ours, theirs, mean):
    """Largest errors against float64, of outputs and of gradients of the input."""
    errors = []
    for build in (ours, theirs):
        x = (random_tensor(8, C, 16, 16) + mean).float().requires_grad_()
        wide = x.detach().double().requires_grad_()
        out, exact = build(C)(x), build(C).double()(wide)
        (grad,), (exact_grad,) = gradients(out, [x]), gradients(exact, [wide])
        errors.append([(out - exact).abs().max().item(), (grad - exact_grad).abs().max().item()])
    for own, other in zip(*errors, strict=True):
        assert own <= 1.1 * other + ULP


@pytest.mark.parametrize(("num_dims", "theirs"), [(3, nn.InstanceNorm1d), (4, nn.InstanceNorm2d)])
def test_instance_norm_with_averages_equals_torchs_over_steps(num_dims: int, theirs):
    knobs = {"eps": EPS, "momentum": 0.3, "affine": True, "track_running_stats": True}
    norm = InstanceNorm(C, **knobs)
    for state, expected in alike_over_steps(norm, theirs(C, **knobs), num_dims):
        del state["num_batches_tracked"], expected["num_batches_tracked"]  # torch's does not count
        close(state, expected)
    assert norm.num_batches_tracked == 3
    norm.train().track_running_stats = False
    held = norm.running_mean.clone()
    norm(random_tensor(*SHAPES[num_dims]))
    close(norm.running_mean, held)
    assert not InstanceNorm(C).state_dict().keys() - {"weight", "bias"}


def test_a_momentum_that_moves_no_averages_is_refused():
    with pytest.raises(UserError, match=r"momentum=0.5 has no effect .*track_running_stats=true"):
        InstanceNorm(C, momentum=0.5)


def test_averages_of_instances_count_real_positions_alone():
    norm = InstanceNorm(C, momentum=1, track_running_stats=True)
    x, mask = torch.randn(2, C, 6), torch.arange(6) < torch.tensor([[6], [3]])
    norm(x, mask)
    parts = [x[0], x[1, :, :3]]
    assert_close(norm.running_mean, torch.stack([part.mean(1) for part in parts]).mean(0))
    assert_close(norm.running_var, torch.stack([part.var(1) for part in parts]).mean(0))


@pytest.mark.parametrize("name", ["causal_instance", "causal_group"])
def test_float32_far_from_zero_is_close_to_float64(name):
    """E[x^2] - E[x]^2 would be off by 0.1 there, a tenth of the variance."""
    x = random_tensor(2, C, 512, dtype=torch.float) + 1e3
    assert_close(make(name).float()(x).double(), make(name)(x.double()), rtol=0, atol=2e-5)


# ---------------------------------------------------------------- batch norm per position

N, T = 11, 5


def per_position(training: bool) -> BatchNormPerPosition:
    norm = BatchNormPerPosition(C, num_positions=T, eps=EPS)
    return randomize(norm.double()).train(training)


@pytest.mark.parametrize("training", [True, False])
def test_each_position_is_torch_batch_norm_of_its_real_samples(training):
    """Texts of 1 to T tokens, as a site shows them; at the last position one sample is real."""
    norm, start = per_position(training), per_position(training).state_dict()
    mask = torch.arange(T) < 1 + torch.arange(N)[:, None] % T
    mask[5:, 4] = False
    x = random_tensor(N, C, T).mT.contiguous().mT
    out = norm(x, mask)
    for t in range(T - 1):
        theirs, real = nn.BatchNorm1d(C, eps=EPS).double().train(training), mask[:, t]
        rows = {name: start[name][t] for name in ("running_mean", "running_var")}
        theirs.load_state_dict({**start, **rows})
        assert_close(out[real, :, t], theirs(x[real, :, t]), rtol=0, atol=1e-12)
        assert_close(norm.running_mean[t], theirs.running_mean, rtol=0, atol=1e-12)
        assert_close(norm.running_var[t], theirs.running_var, rtol=0, atol=1e-12)
    if training:  # one sample has no variance: it moves the mean alone
        assert torch.equal(norm.num_values, mask.sum(dim=0))
        assert_close(out[mask[:, 4], :, 4], start["bias"][None], rtol=0, atol=0)
        mean = 0.9 * start["running_mean"][4] + 0.1 * x[mask[:, 4], :, 4][0]
        assert_close(norm.running_mean[4], mean, rtol=0, atol=1e-12)
        assert torch.equal(norm.running_var[4], start["running_var"][4])


@pytest.mark.parametrize("training", [True, False])
def test_shorter_input_meets_the_first_rows_and_moves_no_other(training):
    full, short, start = (per_position(training) for _ in range(3))
    x = random_tensor(N, C, T)
    assert_close(short(x[:, :, :3]), full(x)[:, :, :3], rtol=0, atol=1e-14)
    for name in ("running_mean", "running_var"):
        rows = getattr(short, name)
        assert_close(rows[:3], getattr(full, name)[:3], rtol=0, atol=1e-14)
        assert torch.equal(rows[3:], getattr(start, name)[3:])
    assert short.num_values.tolist() == ([N, N, N, 0, 0] if training else [0] * T)


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


def test_slots_that_are_set_and_not_in_use_are_found():
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
        assert_close(out, expected, rtol=0.02, atol=0.02)  # 256 values for all of g


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
