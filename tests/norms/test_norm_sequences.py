"""Norms made for texts: causal instance and group norm, and batch norm per position."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_cases import EPS, C, gradients, random_tensor, randomize
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.causal import CausalGroupNorm, CausalInstanceNorm
from normexp.norms.per_position import BatchNormPerPosition

N, T = 11, 5
CAUSAL = {
    "instance": lambda: CausalInstanceNorm(C, eps=EPS),
    "group": lambda: CausalGroupNorm(C, num_groups=2, eps=EPS),
    "one_group": lambda: CausalGroupNorm(C, num_groups=1, eps=EPS),
}
BOTH = pytest.mark.parametrize("name", CAUSAL)
MODES = pytest.mark.parametrize("training", [True, False])


@BOTH
@MODES
@pytest.mark.parametrize("change", [1.0, 1e6, float("nan")])
def test_a_later_position_influences_nothing_earlier_and_gets_no_gradient(name, training, change):
    norm = randomize(CAUSAL[name]()).train(training)
    x = random_tensor(4, C, 9, dtype=torch.float).requires_grad_()
    before = norm(x)
    for first in range(1, 9):
        changed = x.detach().clone()
        changed[:, :, first:] += change
        assert torch.equal(norm(changed)[:, :, :first], before[:, :, :first])
    (gradient,) = gradients(before[:, :, :4], [x])
    assert not gradient[:, :, 4:].any() and gradient[:, :, :4].any()


@BOTH
@pytest.mark.parametrize("start", [0.0, 1e3])
def test_float32_far_from_zero_is_close_to_float64(name, start):
    """E[x^2] - E[x]^2 would be off by 0.1 there, which is all of the variance times 0.1."""
    x = random_tensor(2, C, 512, dtype=torch.float) + start
    out, expected = randomize(CAUSAL[name]())(x), randomize(CAUSAL[name]()).double()(x.double())
    assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_inputs_that_a_causal_norm_cannot_take_are_refused():
    for norm in (CausalInstanceNorm(C), CausalGroupNorm(C, num_groups=2)):
        with pytest.raises(UserError, match=r"\(N, C, T\).*\(4, 8, 3, 3\).*try norm=group"):
            norm(torch.zeros(4, C, 3, 3))
    for norm in (CausalInstanceNorm(C), CausalGroupNorm(C, num_groups=C)):
        with pytest.raises(UserError, match=r"\(4, 8, 1\).*try"):
            norm(torch.zeros(4, C, 1))  # a variance of one value, in training
        assert torch.equal(norm.eval()(torch.ones(4, C, 1)), torch.zeros(4, C, 1))
    with pytest.raises(UserError, match=r"\(4, 8\).*try norm=causal_group"):
        CausalInstanceNorm(C).eval()(torch.zeros(4, C))


def per_position() -> BatchNormPerPosition:
    return randomize(BatchNormPerPosition(C, num_positions=T, eps=EPS).double())


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


@MODES
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_position_is_torch_batch_norm_of_its_real_samples(masked, transposed, training):
    """Also for a sequence as a site shows it, transposed; and for gradients."""
    norm, mask = per_position().train(training), padded()
    if not masked:
        mask = torch.ones_like(mask)
    x = random_tensor(N, C, T)
    x = x.mT.contiguous().mT.requires_grad_() if transposed else x.requires_grad_()
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


def test_one_real_sample_at_a_position_moves_the_running_mean_alone():
    norm, start = per_position(), per_position()
    x, mask = random_tensor(N, C, T), padded()
    (alone,) = mask[:, 4].nonzero()
    out = norm(x, mask)
    assert_close(out[alone, :, 4], norm.state_dict()["bias"][None], rtol=0, atol=0)
    expected = 0.9 * start.running_mean[4] + 0.1 * x[alone[0], :, 4]
    assert_close(norm.running_mean[4], expected, rtol=0, atol=1e-12)
    assert torch.equal(norm.running_var[4], start.running_var[4])


@MODES
def test_another_position_influences_nothing(training):
    norm, x = per_position().train(training), random_tensor(N, C, T)
    before = copy.deepcopy(norm)(x)
    for t in range(T):
        changed = x.clone()
        changed[:, :, t] = float("nan")
        others = [s for s in range(T) if s != t]
        assert torch.equal(copy.deepcopy(norm)(changed)[:, :, others], before[:, :, others])


@MODES
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
    for momentum in (None, 0.0, 1.5):
        with pytest.raises(UserError, match="momentum="):
            BatchNormPerPosition(C, num_positions=T, momentum=momentum)  # type: ignore[arg-type]
