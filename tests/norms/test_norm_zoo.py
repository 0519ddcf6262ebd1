"""The per-sample and statistics-free norms: their formulas, and what holds for all of them."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_cases import SHAPES, C, gradients, random_mask, random_tensor, randomize
from test_norm_vmap import S, compare_stack_with_loop
from torch import Tensor, nn
from torch.testing import assert_close
from zoo_cases import ZOO, ZOO_AND_DIMS

MIXES_SAMPLES = ["evonorm_b0"]


def make(name: str, dtype: torch.dtype = torch.double) -> nn.Module:
    return randomize(ZOO[name].make().to(dtype))


def flat(x: Tensor) -> Tensor:
    return x.flatten(2) if x.ndim > 2 else x[..., None]


def mask_for(num_dims: int) -> Tensor:
    if num_dims == 2:
        return torch.tensor([True, False, True, True, False, True])
    shape = SHAPES[num_dims]
    return random_mask(shape[0], *shape[2:])


@pytest.mark.parametrize(("name", "num_dims"), ZOO_AND_DIMS)
def test_norm_is_its_textbook_formula(name, num_dims):
    norm = make(name)
    parameters = {key: value.detach() for key, value in norm.named_parameters()}
    x = random_tensor(*SHAPES[num_dims]) * 3 - 1
    expected = ZOO[name].textbook(flat(x), parameters).view(x.shape)
    assert_close(norm(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_those_of_differences(name):
    norm = make(name)
    x = random_tensor(3, C, 4).requires_grad_()
    inputs = (x, *norm.parameters())
    names = [key for key, _ in norm.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (x,))

    torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("form", [torch.channels_last, "strided"], ids=["channels_last", "strided"])
@pytest.mark.parametrize("name", ZOO)
def test_memory_layout_of_the_input_moves_nothing(name, form):
    x = random_tensor(*SHAPES[4])
    other = x.mT.contiguous().mT if form == "strided" else x.contiguous(memory_format=form)
    assert other.stride() != x.stride()
    assert_close(make(name)(other), make(name)(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ZOO)
def test_half_precision_far_from_zero_is_the_float32_result_rounded(name, dtype):
    norm = make(name, torch.float)
    x = (random_tensor(*SHAPES[4], dtype=torch.float) + 30).to(dtype)
    out, expected = norm(x), norm(x.float())
    assert out.dtype == dtype
    assert_close(out, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", ZOO)
def test_a_norm_cast_to_bf16_as_a_whole_still_runs(name):
    norm = ZOO[name].make().bfloat16()
    x = random_tensor(*SHAPES[4], dtype=torch.bfloat16)
    assert norm(x).dtype == norm.eval()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
@pytest.mark.parametrize("name", ZOO)
def test_values_and_gradients_are_finite_at_constant_input_and_at_any_scale(name, scale, training):
    norm = make(name, torch.float).train(training)
    noise = random_tensor(*SHAPES[4], dtype=torch.float)
    for x in (noise * scale, torch.full_like(noise, scale)):
        x.requires_grad_()
        out = norm(x)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(out, [x, *norm.parameters()]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_a_batch_without_samples_passes(name, training):
    norm = make(name).train(training)
    before = {key: value.clone() for key, value in norm.named_buffers()}
    assert norm(torch.zeros(0, C, 3, 3, dtype=torch.double)).shape == (0, C, 3, 3)
    assert_close(dict(norm.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_reached_and_a_trained_norm_can_be_copied(name):
    norm = make(name, torch.float)
    x = random_tensor(*SHAPES[4], dtype=torch.float).requires_grad_()
    assert all(g.any() for g in gradients(norm(x), [x, *norm.parameters()]))
    again = ZOO[name].make()
    again.load_state_dict(norm.state_dict())
    for other in (copy.deepcopy(norm), again):
        assert torch.equal(other.eval()(x), norm.eval()(x))


@pytest.mark.parametrize("name", ZOO)
def test_only_a_norm_of_batches_mixes_samples_and_only_in_training(name):
    for training in (True, False):
        norm = make(name).train(training)
        x = random_tensor(*SHAPES[4])
        changed = torch.cat([x[:1], 3 * x[1:]])
        same = torch.equal(make(name).train(training)(changed)[0], norm(x)[0])
        assert same != (training and name in MIXES_SAMPLES)


@pytest.mark.parametrize("name", ZOO)
def test_positions_mix_where_the_case_says_so(name):
    norm = make(name).eval()
    x = random_tensor(*SHAPES[3])
    changed = x.clone()
    changed[..., 3:] *= 3
    assert torch.equal(norm(changed)[..., :3], norm(x)[..., :3]) != ZOO[name].reads_positions


def run(norm: nn.Module, x: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    x = x.clone().requires_grad_()
    out = norm(x, mask=mask)
    return out, gradients(out, [x, *norm.parameters()])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "num_dims"), ZOO_AND_DIMS)
def test_content_under_the_mask_moves_nothing_and_comes_back_zero(name, num_dims, training):
    norms = [make(name).train(training) for _ in range(2)]
    x, mask = random_tensor(*SHAPES[num_dims]), mask_for(num_dims)
    soiled = torch.where(mask.unsqueeze(1), x, float("nan"))
    out, grads = run(norms[0], x, mask)
    out_soiled, grads_soiled = run(norms[1], soiled, mask)
    assert torch.equal(out, out_soiled)
    assert not out.movedim(1, -1)[~mask].any()
    assert_close(grads_soiled, grads, rtol=0, atol=0)
    assert_close(norms[1].state_dict(), norms[0].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("num_dims", [3, 4])
@pytest.mark.parametrize("name", [name for name in ZOO if name not in MIXES_SAMPLES])
def test_a_masked_sample_equals_its_real_positions_alone(name, num_dims):
    norm = make(name)
    x, mask = random_tensor(*SHAPES[num_dims]), mask_for(num_dims)
    out = norm(x, mask=mask)
    for sample, sample_out, real in zip(x, out, mask, strict=True):
        alone = norm(sample[None, :, real])[0]
        assert_close(sample_out[:, real], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ZOO)
def test_amount_of_padding_moves_nothing(name):
    short, long = make(name), make(name)
    x, mask = random_tensor(*SHAPES[3]), mask_for(3)
    out = short(x, mask=mask)
    longer = long(nn.functional.pad(x, (0, 4), value=77.0), mask=nn.functional.pad(mask, (0, 4)))
    assert_close(longer[..., :5], out, rtol=0, atol=1e-14)
    assert not longer[..., 5:].any()
    assert_close(long.state_dict(), short.state_dict(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("name", "num_dims"), ZOO_AND_DIMS)
def test_a_mask_without_padding_changes_nothing(name, num_dims):
    plain, masked = make(name), make(name)
    x = random_tensor(*SHAPES[num_dims])
    everything = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool)
    assert_close(masked(x, mask=everything), plain(x), rtol=0, atol=1e-12)
    assert_close(masked.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ZOO)
def test_a_sample_of_padding_alone_is_zero_with_finite_gradients(name):
    x, mask = random_tensor(*SHAPES[3]), mask_for(3)
    mask[2] = False
    out, grads = run(make(name), x, mask)
    assert not out[2].any() and not grads[0][2].any()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "num_dims"), [(n, d) for n, d in ZOO_AND_DIMS if d < 4])
def test_stacked_norms_equal_norms_alone(name, num_dims, masked):
    mask = torch.stack([mask_for(num_dims).roll(k, 0) for k in range(S)]) if masked else None
    compare_stack_with_loop(ZOO[name].make, random_tensor(S, *SHAPES[num_dims]), mask)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_dynamo_traces_the_norm_as_one_graph(name):
    norm, reference = make(name, torch.float), make(name, torch.float)
    x, mask = random_tensor(*SHAPES[3], dtype=torch.float), mask_for(3)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert_close(compiled(x, mask), reference(x, mask), rtol=0, atol=0)
