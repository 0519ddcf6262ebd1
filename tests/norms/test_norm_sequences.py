"""Norms made for texts: causal instance and group norm, and batch norm per position."""

from __future__ import annotations

import pytest
import torch
from norm_cases import EPS, C, gradients, random_tensor, randomize
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.causal import CausalGroupNorm, CausalInstanceNorm
from normexp.norms.per_position import BatchNormPerPosition

N, T = 11, 5


def per_position() -> BatchNormPerPosition:
    return randomize(BatchNormPerPosition(C, num_positions=T, eps=EPS).double())


def causal_instance() -> nn.Module:
    return randomize(CausalInstanceNorm(C, eps=EPS).double())


def causal_group() -> nn.Module:
    return randomize(CausalGroupNorm(C, num_groups=2, eps=EPS).double())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [causal_instance, causal_group, per_position])
def test_a_later_position_influences_nothing_earlier_and_gets_no_gradient(make, training):
    x = random_tensor(4, C, T).requires_grad_()
    before = make().train(training)(x)
    for first in range(1, T):
        changed = x.detach().clone()
        changed[:, :, first:] = float("nan")
        assert torch.equal(make().train(training)(changed)[:, :, :first], before[:, :, :first])
    (gradient,) = gradients(before[:, :, :3], [x])
    assert not gradient[:, :, 3:].any() and gradient[:, :, :3].any()


@pytest.mark.parametrize("make", [causal_instance, causal_group])
def test_float32_far_from_zero_is_close_to_float64(make):
    """E[x^2] - E[x]^2 would be off by 0.1 there, which is all of the variance times 0.1."""
    x = random_tensor(2, C, 512, dtype=torch.float) + 1e3
    assert_close(make().float()(x).double(), make()(x.double()), rtol=0, atol=2e-5)


def test_inputs_that_a_causal_norm_cannot_take_are_refused():
    for norm in (CausalInstanceNorm(C), CausalGroupNorm(C, num_groups=C)):
        with pytest.raises(UserError, match=r"\(N, C, T\).*\(4, 8, 3, 3\).*try norm=group"):
            norm(torch.zeros(4, C, 3, 3))
        with pytest.raises(UserError, match=r"\(4, 8, 1\).*try"):
            norm(torch.zeros(4, C, 1))  # a variance of one value, in training
        assert torch.equal(norm.eval()(torch.ones(4, C, 1)), torch.zeros(4, C, 1))
    with pytest.raises(UserError, match=r"\(4, 8\).*try norm=causal_group"):
        CausalInstanceNorm(C).eval()(torch.zeros(4, C))


def padded() -> Tensor:
    """Texts of 1 to T tokens: all begin, few go on, one alone reaches the last position."""
    mask = torch.arange(T) < 1 + torch.arange(N)[:, None] % T
    mask[5:, 4] = False
    return mask


def torch_at(norm: BatchNormPerPosition, t: int, training: bool) -> nn.BatchNorm1d:
    """torch's batch norm with the state of one position."""
    theirs = nn.BatchNorm1d(C, eps=EPS).double().train(training)
    state = norm.state_dict()
    rows = {name: state[name][t] for name in ("running_mean", "running_var")}
    theirs.load_state_dict({**state, **rows})
    return theirs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_each_position_is_torch_batch_norm_of_its_real_samples(masked, training):
    """Of a sequence as a site shows it, transposed. At the last position one sample is real."""
    norm, start = per_position().train(training), per_position()
    mask = padded() if masked else torch.ones(N, T, dtype=torch.bool)
    x = random_tensor(N, C, T).mT.contiguous().mT.requires_grad_()
    theirs = [torch_at(norm, t, training) for t in range(T)]
    out = norm(x, mask if masked else None)
    (found,) = gradients(out, [x])
    weight = random_tensor(*out.shape, seed=11)
    for t in range(T - 1 if masked else T):
        real = mask[:, t]
        expected = theirs[t](x[real, :, t])
        assert_close(out[real, :, t], expected, rtol=0, atol=1e-12)
        (grad,) = torch.autograd.grad((expected * weight[real, :, t]).sum(), x)
        assert_close(found[:, :, t], grad[:, :, t], rtol=0, atol=1e-12)
        assert_close(norm.running_mean[t], theirs[t].running_mean, rtol=0, atol=1e-12)
        assert_close(norm.running_var[t], theirs[t].running_var, rtol=0, atol=1e-12)
    assert not out.movedim(1, -1)[~mask].any()
    if training:
        assert torch.equal(norm.num_values, mask.sum(dim=0))
    if training and masked:  # one sample has no variance: it moves the mean alone
        (alone,) = mask[:, 4].nonzero()
        assert_close(out[alone, :, 4], norm.state_dict()["bias"][None], rtol=0, atol=0)
        mean = 0.9 * start.running_mean[4] + 0.1 * x[alone[0], :, 4]
        assert_close(norm.running_mean[4], mean, rtol=0, atol=1e-12)
        assert torch.equal(norm.running_var[4], start.running_var[4])


@pytest.mark.parametrize("training", [True, False])
def test_shorter_input_meets_the_first_rows_and_moves_no_other(training):
    full, short, start = per_position(), per_position(), per_position()
    x = random_tensor(N, C, T)
    out, expected = short.train(training)(x[:, :, :3]), full.train(training)(x)[:, :, :3]
    assert_close(out, expected, rtol=0, atol=1e-14)
    for name in ("running_mean", "running_var"):
        rows = getattr(short, name)
        assert_close(rows[:3], getattr(full, name)[:3], rtol=0, atol=1e-14)
        assert torch.equal(rows[3:], getattr(start, name)[3:])
    assert short.num_values.tolist() == ([N, N, N, 0, 0] if training else [0] * T)


def test_inputs_that_a_norm_per_position_cannot_take_are_refused():
    norm = per_position()
    for mask in (None, torch.ones(N, 7, dtype=torch.bool)):
        with pytest.raises(UserError, match="num_positions=5.*num_positions=7.*qk_norm=false"):
            norm(torch.zeros(N, C, 7), mask)
    for shape in ((N, C), (N, C, 2, 2)):
        with pytest.raises(UserError, match=r"\(N, C, T\).*norm.view=sequence"):
            norm(torch.zeros(shape))
    with pytest.raises(UserError, match="one sample.*batch_size"):
        norm(torch.zeros(1, C, T))
    assert norm.num_batches_tracked == 0
    norm.eval()(torch.zeros(1, C, T).double())
