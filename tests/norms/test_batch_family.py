"""The batch family and the tutorials' mistakes: their formulas, and what holds for all of them."""

from __future__ import annotations

import copy

import pytest
import torch
from batch_cases import FAMILY, FAMILY_AND_DIMS, State
from norm_cases import SHAPES, C, gradients, random_mask, random_tensor, randomize
from test_norm_vmap import S, compare_stack_with_loop
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError

STEPS = 2  # that a norm of these tests has made
SPREAD = ((-3, 3), (0.05, 2))  # of the channels' means and sizes, first and last
MODES = pytest.mark.parametrize("training", [True, False])


def make(name: str, dtype: torch.dtype = torch.double) -> nn.Module:
    norm = randomize(FAMILY[name].make().to(dtype))
    counter = dict(norm.named_buffers()).get("num_batches_tracked")
    if counter is not None:
        counter.fill_(STEPS)
    if name == "eval_norm":
        dict(norm.named_buffers())["running_share"].fill_(0.3)
    return norm


def state_of(norm: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in norm.state_dict().items()}


def mask_for(num_dims: int) -> Tensor:
    if num_dims == 2:
        return torch.tensor([True, False, True, True, False, True])
    shape = SHAPES[num_dims]
    return random_mask(shape[0], *shape[2:])


def run(norm: nn.Module, x: Tensor, mask: Tensor | None = None):
    x = x.clone().requires_grad_()
    out = norm(x, mask=mask)
    return out, gradients(out, [x, *norm.parameters()])


@MODES
@pytest.mark.parametrize(("name", "num_dims"), FAMILY_AND_DIMS)
def test_norm_is_its_textbook_formula(name, num_dims, training):
    norm = make(name).train(training)
    # Channels below and above the running averages, so that corrections meet both their bounds.
    means, sizes = (torch.linspace(*ends, C).view(-1, *[1] * (num_dims - 2)) for ends in SPREAD)
    state, x = state_of(norm), (random_tensor(*SHAPES[num_dims]) * 3 + means) * sizes
    flat = x.flatten(2) if num_dims > 2 else x[..., None]
    textbook = FAMILY[name].training if training else FAMILY[name].evaluation
    affine = state["weight"].view(1, -1, 1), state["bias"].view(1, -1, 1)
    expected = textbook(flat, state) * affine[0] + affine[1]
    assert_close(norm(x), expected.view(x.shape), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [n for n, c in FAMILY.items() if not c.moves_in_backward and n != "batch_renorm"],
)
def test_gradients_are_those_of_the_formula(name):
    norm = make(name)
    state, x = state_of(norm), random_tensor(4, C, 5).requires_grad_()
    state["gate"] = state.get("gate", torch.ones(C)).clamp(0, 1)
    parameters = dict(norm.named_parameters())
    state = {**state, **parameters}
    expected = FAMILY[name].training(x, state)
    expected = expected * parameters["weight"].view(-1, 1) + parameters["bias"].view(-1, 1)
    inputs = [x, *(value for key, value in parameters.items() if key != "gate")]
    assert_close(gradients(norm(x), inputs), gradients(expected, inputs), rtol=0, atol=1e-10)


@MODES
@pytest.mark.parametrize("name", FAMILY)
def test_memory_layout_of_the_input_moves_nothing_and_is_kept(name, training):
    x = random_tensor(*SHAPES[4])
    out = make(name).train(training)(x.contiguous(memory_format=torch.channels_last))
    assert_close(out, make(name).train(training)(x), rtol=0, atol=1e-12)
    strided = make(name).train(training)(x.mT.contiguous().mT)
    assert_close(strided, out, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FAMILY)
def test_bf16_far_from_zero_is_the_float32_result_rounded(name):
    x = (random_tensor(*SHAPES[4], dtype=torch.float) + 30).bfloat16()
    out, expected = make(name, torch.float)(x), make(name, torch.float)(x.float())
    assert out.dtype == torch.bfloat16
    assert_close(out, expected.bfloat16(), rtol=0, atol=0)
    norm = FAMILY[name].make().bfloat16()
    assert norm(x).dtype == norm.eval()(x).dtype == torch.bfloat16


@MODES
@pytest.mark.parametrize("name", [name for name, case in FAMILY.items() if case.has_eps])
def test_values_and_gradients_are_finite_at_constant_input_and_at_any_scale(name, training):
    noise = random_tensor(*SHAPES[4], dtype=torch.float)
    for scale in (0.0, 1e-12, 1e3):
        for x in (noise * scale, torch.full_like(noise, scale)):
            out, grads = run(make(name, torch.float).train(training), x)
            assert out.isfinite().all()
            assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", FAMILY)
def test_a_trained_norm_keeps_no_graph_and_can_be_copied_and_saved(name):
    norm = make(name, torch.float)
    x = random_tensor(*SHAPES[4], dtype=torch.float)
    out, grads = run(norm, x)
    assert all(g.any() for g in grads)
    assert all(buffer.grad_fn is None for buffer in norm.buffers())
    again = FAMILY[name].make()
    again.load_state_dict(norm.state_dict())
    for other in (copy.deepcopy(norm), again):
        assert torch.equal(other.eval()(x), norm.eval()(x))
    del out


@pytest.mark.parametrize("name", FAMILY)
def test_samples_mix_in_training_alone_and_where_the_case_says_so(name):
    for training in (True, False):
        x = random_tensor(*SHAPES[4])
        changed = torch.cat([x[:1], 3 * x[1:]])
        alone = [make(name).train(training)(y)[0] for y in (x, changed)]
        assert torch.equal(*alone) != (training and FAMILY[name].mixes_samples)


@MODES
@pytest.mark.parametrize("content", [1e9, float("nan")])
@pytest.mark.parametrize("name", FAMILY)
def test_content_under_the_mask_moves_nothing_and_comes_back_zero(name, content, training):
    norms = [make(name).train(training) for _ in range(2)]
    x, mask = random_tensor(*SHAPES[3]), mask_for(3)
    out, grads = run(norms[0], x, mask)
    soiled, soiled_grads = run(norms[1], torch.where(mask.unsqueeze(1), x, content), mask)
    assert torch.equal(out, soiled)
    assert not out.movedim(1, -1)[~mask].any()
    assert_close(soiled_grads, grads, rtol=0, atol=0)
    assert_close(norms[1].state_dict(), norms[0].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", [n for n, c in FAMILY.items() if not c.needs_positions])
def test_masked_rows_count_as_if_they_were_not_there(name):
    """In two dimensions each real row is a sample; ghost batches are cut before the mask."""
    x, mask = random_tensor(*SHAPES[2]), mask_for(2)
    if name == "ghost":
        mask = torch.tensor([True, True, False, False, True, True])
    whole, rest = make(name), make(name)
    assert_close(whole(x, mask)[mask], rest(x[mask]), rtol=0, atol=1e-12)
    assert_close(whole.state_dict(), rest.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "num_dims"), FAMILY_AND_DIMS)
def test_a_mask_without_padding_changes_nothing(name, num_dims):
    plain, masked = make(name), make(name)
    x = random_tensor(*SHAPES[num_dims])
    everything = torch.ones(x.shape[0], *x.shape[2:], dtype=torch.bool)
    assert_close(run(masked, x, everything), run(plain, x), rtol=0, atol=1e-12)
    assert_close(masked.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FAMILY)
def test_padding_alone_is_zero_and_leaves_the_averages(name):
    norm = make(name)
    before, x = state_of(norm), random_tensor(*SHAPES[3])
    out, grads = run(norm, x, torch.zeros(6, 5, dtype=torch.bool))
    assert not out.any() and not grads[0].any()
    assert all(g.isfinite().all() for g in grads)
    for key in ("running_mean", "running_var", "running_square", "running_deviation"):
        if key in before:
            assert torch.equal(norm.state_dict()[key], before[key])


@MODES
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "num_dims"), [(name, n) for name, n in FAMILY_AND_DIMS if n in (2, 4)]
)
def test_stacked_norms_equal_norms_alone(name, num_dims, masked, training):
    mask = torch.stack([mask_for(num_dims).roll(k, 0) for k in range(S)]) if masked else None
    x = random_tensor(S, *SHAPES[num_dims])
    compare_stack_with_loop(lambda: make(name).train(training), x, mask)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_dynamo_traces_the_norm_as_one_graph(name):
    torch.compiler.reset()  # many classes share one `forward`
    x, mask = random_tensor(*SHAPES[3], dtype=torch.float), mask_for(3)
    norm, reference = make(name, torch.float), make(name, torch.float)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert_close(compiled(x, mask), reference(x, mask), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch_renorm", "power", "moving_average_batch"])
def test_a_compiled_backward_uses_the_state_before_the_step(name):
    """Functionalized graphs may read a buffer that the forward has written since."""
    torch.compiler.reset()
    x = random_tensor(*SHAPES[3], dtype=torch.float)
    norm, reference = make(name, torch.float), make(name, torch.float)
    y = x.clone().requires_grad_()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    found = gradients(compiled(y), [y, *norm.parameters()])
    assert_close(found, run(reference, x)[1], rtol=1e-5, atol=1e-6)
    assert_close(norm.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in FAMILY if name != "frozen" and not name.startswith("ln_")]
)
def test_one_value_per_channel_is_refused_in_training_only(name):
    shape = (1, C, 1) if FAMILY[name].needs_positions else (1, C)
    with pytest.raises(UserError, match="one value per channel"):
        make(name)(torch.zeros(shape, dtype=torch.double))
    if not FAMILY[name].needs_positions:
        make(name).eval()(torch.zeros(shape, dtype=torch.double))


@pytest.mark.parametrize("name", [name for name, case in FAMILY.items() if case.needs_positions])
def test_a_norm_of_positions_refuses_one(name):
    with pytest.raises(UserError, match="needs positions"):
        make(name)(torch.zeros((4, C), dtype=torch.double))
