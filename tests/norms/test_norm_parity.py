"""Shipped norms against torch's own: batch norm step by step, others far from zero."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from norm_cases import EPS, SHAPES, C, gradients, make, random_tensor, randomize
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.norms.batch import BatchNorm, FrozenBatchNorm
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm, LayerNorm2d, RMSNorm
from normexp.norms.sequence import BatchNormPerPosition

BATCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class ChannelsLast(nn.LayerNorm):
    """torch's layer norm of (N, *, C), shown (N, C, *)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(
    "knobs", [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}]
)
def test_batch_norm_equals_torchs_over_steps(knobs):
    """Output, gradients, and state_dict with the same names; training and evaluation in turn."""
    close = partial(assert_close, rtol=1e-10, atol=1e-10)
    for num_dims, theirs in BATCH.items():
        norm = BatchNorm(C, eps=EPS, **knobs).double()
        reference = randomize(theirs(C, eps=EPS, **knobs).double())
        norm.load_state_dict(reference.state_dict())
        for step, training in enumerate((True, True, False, True)):
            x = 2 * random_tensor(*SHAPES[num_dims], seed=step) + 1
            x.requires_grad_()
            out, expected = norm.train(training)(x), reference.train(training)(x)
            close(out, expected)
            found = gradients(out, [x, *norm.parameters()])
            close(found, gradients(expected, [x, *reference.parameters()]))
            close(norm.state_dict(), reference.state_dict())


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
