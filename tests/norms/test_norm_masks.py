"""What is under a mask moves nothing, and what is real is normalized as if alone."""

from __future__ import annotations

import pytest
import torch
from norm_cases import (
    CASES,
    CASES_AND_DIMS,
    EPS,
    SHAPES,
    C,
    gradients,
    random_mask,
    random_tensor,
    randomize,
)
from torch import Tensor, nn
from torch.testing import assert_close

POOL_POSITIONS = ["layer", "instance", "group"]
POOL_SAMPLES_OR_CHANNELS = ["batch", "layer2d", "rms", "none"]


def mask_for(shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 2:
        return torch.tensor([True, False, True, True, False, True])
    return random_mask(shape[0], *shape[2:])


def run(norm: nn.Module, x: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output, and gradients of its real values for input and parameters."""
    x = x.clone().requires_grad_()
    out = norm(x, mask=mask)
    return out, gradients(out, [x, *norm.parameters()])


@pytest.mark.parametrize("num_dims", [3, 4, 5])
@pytest.mark.parametrize("name", POOL_POSITIONS)
def test_masked_sample_equals_torch_on_its_real_positions_alone(name, num_dims):
    theirs = randomize(CASES[name].counterpart(3).double())
    ours = CASES[name].make().double()
    ours.load_state_dict(theirs.state_dict())
    x, mask = random_tensor(*SHAPES[num_dims]), mask_for(SHAPES[num_dims])
    out = ours(x, mask=mask)
    for sample, sample_out, real in zip(x, out, mask, strict=True):
        assert_close(sample_out[:, real], theirs(sample[None, :, real])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_dims", [2, 3, 4, 5])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", POOL_SAMPLES_OR_CHANNELS)
def test_masked_batch_equals_torch_on_its_real_values_alone(name, training, num_dims):
    theirs = randomize(CASES[name].counterpart(2).double()).train(training)
    ours = CASES[name].make().double().train(training)
    ours.load_state_dict(theirs.state_dict())
    x, mask = random_tensor(*SHAPES[num_dims]), mask_for(SHAPES[num_dims])
    out = ours(x, mask=mask)
    expected = theirs(x.movedim(1, -1)[mask])  # (real values, C)
    assert_close(out.movedim(1, -1)[mask], expected, rtol=0, atol=1e-12)
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "num_dims"), CASES_AND_DIMS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("content", [1e9, float("inf"), float("nan")])
def test_content_under_the_mask_moves_nothing_and_comes_back_zero(
    name, num_dims, training, content
):
    norms = [randomize(CASES[name].make().double()).train(training) for _ in range(2)]
    x, mask = random_tensor(*SHAPES[num_dims]), mask_for(SHAPES[num_dims])
    soiled = torch.where(mask.unsqueeze(1), x, content)
    out, grads = run(norms[0], x, mask)
    out_soiled, grads_soiled = run(norms[1], soiled, mask)
    assert torch.equal(out, out_soiled)
    assert not out.movedim(1, -1)[~mask].any()
    assert_close(grads_soiled, grads, rtol=0, atol=0)
    assert_close(norms[1].state_dict(), norms[0].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_amount_of_padding_moves_nothing(name):
    short, long = (randomize(CASES[name].make().double()) for _ in range(2))
    x, mask = random_tensor(*SHAPES[3]), mask_for(SHAPES[3])
    padded = torch.cat([x, torch.full((6, C, 4), 77.0)], dim=2)
    longer_mask = torch.cat([mask, torch.zeros(6, 4, dtype=torch.bool)], dim=1)
    out, longer_out = short(x, mask=mask), long(padded, mask=longer_mask)
    assert_close(longer_out[..., :5], out, rtol=0, atol=1e-14)
    assert not longer_out[..., 5:].any()
    assert_close(long.state_dict(), short.state_dict(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("name", "num_dims"), CASES_AND_DIMS)
def test_a_mask_without_padding_changes_nothing(name, num_dims):
    plain, masked = (randomize(CASES[name].make().double()) for _ in range(2))
    x = random_tensor(*SHAPES[num_dims])
    everything = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool)
    assert_close(masked(x, mask=everything), plain(x), rtol=0, atol=1e-12)
    assert_close(masked.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_sample_of_padding_alone_is_zero_with_finite_gradients(name):
    norm = randomize(CASES[name].make().double())
    x, mask = random_tensor(*SHAPES[3]), mask_for(SHAPES[3])
    mask[2] = False
    out, grads = run(norm, x, mask)
    assert not out[2].any() and not grads[0][2].any()
    assert all(g.isfinite().all() for g in grads)


def test_a_batch_of_padding_alone_leaves_running_averages():
    norm = randomize(CASES["batch"].make().double())
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    out = norm(random_tensor(*SHAPES[3]), mask=torch.zeros(6, 5, dtype=torch.bool))
    assert not out.any()
    for name in ("running_mean", "running_var"):
        assert torch.equal(norm.state_dict()[name], before[name])


@pytest.mark.parametrize("name", CASES)
def test_masked_bf16_is_the_float32_result_rounded(name):
    norm = randomize(CASES[name].make())
    x, mask = random_tensor(*SHAPES[3], dtype=torch.float).bfloat16() + 30, mask_for(SHAPES[3])
    out, expected = norm(x, mask=mask), norm(x.float(), mask=mask)
    assert out.dtype == torch.bfloat16
    assert_close(out, expected.bfloat16(), rtol=0, atol=0)


def test_masked_variance_has_eps_inside_the_root():
    norm = CASES["instance"].make().double()
    x = torch.zeros(1, C, 4, dtype=torch.double)
    x[..., 0], x[..., 1] = 1, -1  # mean 0, variance 1 over the two real positions
    out = norm(x, mask=torch.tensor([[True, True, False, False]]))
    assert_close(out[0, 0, 0].item(), (1 + EPS) ** -0.5, rtol=0, atol=1e-12)
