"""Batch norm per position is batch norm of C * T features, with an affine per channel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from norm_cases import EPS, C, gradients, random_tensor, randomize
from per_position_cases import N, T, make, make_random, padded
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.per_position import BatchNormPerPosition


def of_all_features(norm: BatchNormPerPosition) -> nn.BatchNorm1d:
    """torch's batch norm of the T * C features of a sequence, with the same state."""
    theirs = nn.BatchNorm1d(T * C, eps=EPS).double()
    state = dict(norm.state_dict())
    for name in ("weight", "bias"):
        state[name] = state[name].repeat(T)
    for name in ("running_mean", "running_var"):
        state[name] = state[name].flatten()
    theirs.load_state_dict(state)
    return theirs


def flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(1)  # (N, C, T) -> (N, T * C)


def test_training_and_evaluation_equal_torch_on_flattened_sequences():
    ours = make_random()
    theirs = of_all_features(ours)
    for step, training in enumerate([True, True, False, True]):
        x = (2 * random_tensor(N, C, T, seed=step) + 1).requires_grad_()
        out, expected = ours.train(training)(x), theirs.train(training)(flat(x))
        assert_close(flat(out), expected, rtol=0, atol=1e-12)
        expected = expected.unflatten(1, (T, C)).transpose(1, 2)
        found = gradients(out, [x, *ours.parameters()])
        x_grad, *affine_grads = gradients(expected, [x, *theirs.parameters()])
        assert_close(found[0], x_grad, rtol=0, atol=1e-12)
        for own, per_feature in zip(found[1:], affine_grads, strict=True):
            assert_close(own, per_feature.view(T, C).sum(dim=0), rtol=0, atol=1e-12)
        for name in ("running_mean", "running_var"):
            expected = getattr(theirs, name).view(T, C)
            assert_close(getattr(ours, name), expected, rtol=0, atol=1e-12)
        assert ours.num_batches_tracked == theirs.num_batches_tracked


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("length", [T, T - 1])
def test_a_transposed_sequence_gives_what_a_contiguous_one_gives(training, length):
    """As a site shows (B, T, C): features are then in another order."""
    ours, theirs = make_random().train(training), make_random().train(training)
    x = random_tensor(N, C, length).requires_grad_()
    turned = x.detach().mT.contiguous().mT.requires_grad_()
    assert turned.stride() != x.stride()
    out, expected = ours(turned), theirs(x)
    assert_close(out, expected, rtol=0, atol=1e-12)
    found = gradients(out, [turned, *ours.parameters()])
    expected_grads = gradients(expected, [x, *theirs.parameters()])
    assert_close(found, expected_grads, rtol=0, atol=1e-12)
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_positions", [1, T])
def test_a_backward_may_come_after_another_forward(num_positions):
    norm = BatchNormPerPosition(C, num_positions=num_positions).double()
    x = random_tensor(N, C, num_positions).requires_grad_()
    first, second = norm(x), norm(2 * x.detach())
    assert second.shape == first.shape
    (late,) = gradients(first, [x])
    (early,) = gradients(norm(x), [x])
    assert_close(late, early, rtol=0, atol=1e-12)


def test_each_position_is_torch_batch_norm_of_its_real_samples():
    ours = make_random()
    x, mask = random_tensor(N, C, T), padded()
    start = copy.deepcopy(ours)
    out = ours(x, mask)
    assert torch.equal(ours.num_values, mask.sum(dim=0))
    for t in range(T - 1):
        theirs = nn.BatchNorm1d(C, eps=EPS).double()
        rows = {name: start.state_dict()[name][t] for name in ("running_mean", "running_var")}
        theirs.load_state_dict({**start.state_dict(), **rows})
        real = mask[:, t]
        assert_close(out[real, :, t], theirs(x[real, :, t]), rtol=0, atol=1e-12)
        assert_close(ours.running_mean[t], theirs.running_mean, rtol=0, atol=1e-12)
        assert_close(ours.running_var[t], theirs.running_var, rtol=0, atol=1e-12)
    assert not out.movedim(1, -1)[~mask].any()


def test_one_real_sample_at_a_position_moves_the_running_mean_alone():
    norm = make_random()
    start = copy.deepcopy(norm)
    x, mask = random_tensor(N, C, T), padded()
    (alone,) = mask[:, 4].nonzero()
    out = norm(x, mask)
    assert_close(out[alone, :, 4], norm.state_dict()["bias"][None], rtol=0, atol=0)
    expected = 0.9 * start.running_mean[4] + 0.1 * x[alone[0], :, 4]
    assert_close(norm.running_mean[4], expected, rtol=0, atol=1e-12)
    assert torch.equal(norm.running_var[4], start.running_var[4])


@pytest.mark.parametrize("masked", [False, True])
def test_evaluation_uses_the_running_averages_of_the_position(masked):
    norm = make_random().eval()
    x, mask = random_tensor(N, C, T), padded() if masked else torch.ones(N, T, dtype=torch.bool)
    state = norm.state_dict()
    scale = state["weight"] / (state["running_var"] + EPS).sqrt()  # (T, C)
    expected = (x.transpose(1, 2) - state["running_mean"]) * scale + state["bias"]
    expected = expected.transpose(1, 2) * mask[:, None]
    assert_close(norm(x, mask if masked else None), expected, rtol=0, atol=1e-12)
    assert_close(norm.forward_groups(x[None], mask[None])[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("change", [1.0, float("nan")])
@pytest.mark.parametrize("training", [True, False])
def test_another_position_moves_nothing(training, change):
    norm, x = make_random().train(training), random_tensor(N, C, T)
    before = copy.deepcopy(norm)(x)
    for t in range(T):
        changed = x.clone()
        changed[:, :, t] += change
        others = [s for s in range(T) if s != t]
        assert torch.equal(copy.deepcopy(norm)(changed)[:, :, others], before[:, :, others])


def test_samples_mix_in_training_only():
    norm, x = make_random(), random_tensor(N, C, T)
    changed = x.clone()
    changed[0] *= 3
    assert not torch.allclose(copy.deepcopy(norm)(x)[1:], copy.deepcopy(norm)(changed)[1:])
    norm.eval()
    assert torch.equal(norm(x)[1:], norm(changed)[1:])


@pytest.mark.parametrize("training", [True, False])
def test_shorter_input_meets_the_first_rows_and_moves_no_other(training):
    full, short = make_random().train(training), make_random().train(training)
    start, x = copy.deepcopy(full), random_tensor(N, C, T)
    out, expected = short(x[:, :, :3]), full(x)[:, :, :3]
    assert_close(out, expected, rtol=0, atol=1e-14)
    for name in ("running_mean", "running_var"):
        rows, given = getattr(short, name), getattr(start, name)
        assert_close(rows[:3], getattr(full, name)[:3], rtol=0, atol=1e-14)
        assert torch.equal(rows[3:], given[3:])
    assert short.num_values.tolist() == ([N, N, N, 0, 0] if training else [0] * T)


@pytest.mark.parametrize("content", [1e9, float("inf"), float("nan")])
@pytest.mark.parametrize("training", [True, False])
def test_content_under_the_mask_moves_nothing(training, content):
    norms = [make_random().train(training) for _ in range(2)]
    mask = padded()
    clean = random_tensor(N, C, T).requires_grad_()
    soiled = torch.where(mask.unsqueeze(1), clean.detach(), content).requires_grad_()
    outputs, grads = [], []
    for norm, x in zip(norms, (clean, soiled), strict=True):
        outputs.append(norm(x, mask))
        grads.append(gradients(outputs[-1], [x, *norm.parameters()]))
    assert torch.equal(outputs[0], outputs[1])
    assert_close(grads[1], grads[0], rtol=0, atol=0)
    assert all(gradient.isfinite().all() for gradient in grads[1])
    assert_close(norms[1].state_dict(), norms[0].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_amount_of_padding_moves_nothing(training):
    """Also beyond the positions that the norm knows: no real one lies there."""
    short, long = (make_random().train(training) for _ in range(2))
    x, mask = random_tensor(N, C, T), padded()
    longer = long(F.pad(x, (0, 3), value=77), F.pad(mask, (0, 3)))
    assert torch.equal(longer[:, :, :T], short(x, mask))
    assert not longer[:, :, T:].any()
    assert_close(long.state_dict(), short.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_bf16_is_the_float32_result_rounded(training):
    norm = randomize(make()).train(training)
    x, mask = random_tensor(N, C, T, dtype=torch.float).bfloat16() + 30, padded()
    out = norm(x, mask)
    assert out.dtype == torch.bfloat16
    assert_close(out, norm(x.float(), mask).bfloat16(), rtol=0, atol=0)
    assert copy.deepcopy(norm).bfloat16()(x, mask).dtype == torch.bfloat16


def test_real_positions_beyond_the_last_are_refused():
    message = (
        r"of 7 positions is longer than num_positions=5 .*=7, or qk_norm=false where it is true"
    )
    mask = torch.ones(N, 7, dtype=torch.bool)
    for arguments in [(), (mask,)]:
        with pytest.raises(UserError, match=message):
            make()(torch.zeros(N, C, 7), *arguments)


@pytest.mark.parametrize("shape", [(N, C), (N, C, 2, 2)])
def test_inputs_other_than_sequences_are_refused(shape):
    with pytest.raises(UserError, match=r"needs one positions axis \(N, C, T\)"):
        make()(torch.zeros(shape))


def test_one_sample_is_refused_in_training_only():
    norm = make()
    with pytest.raises(UserError, match="got one sample"):
        norm(torch.zeros(1, C, T))
    assert norm.num_batches_tracked == 0
    norm.eval()(torch.zeros(1, C, T))


@pytest.mark.parametrize("momentum", [None, 0.0, 1.5])
def test_momentum_that_does_not_fit_is_refused(momentum):
    with pytest.raises(UserError, match="momentum="):
        BatchNormPerPosition(C, num_positions=T, momentum=momentum)


@pytest.mark.parametrize("training", [True, False])
def test_without_affine_weight_is_one_and_bias_zero(training):
    bare = BatchNormPerPosition(C, num_positions=T, eps=EPS, affine=False).train(training)
    x = random_tensor(N, C, T, dtype=torch.float)
    assert not list(bare.parameters())
    assert_close(bare(x), make().train(training)(x), rtol=0, atol=0)


def test_state_dict_has_torch_names():
    assert set(make().state_dict()) == set(nn.BatchNorm1d(C).state_dict())
