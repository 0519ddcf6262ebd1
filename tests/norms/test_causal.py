"""Causal instance and group norm: each position by the moments of what came before it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from norm_cases import EPS, C, gradients, random_mask, random_tensor, randomize
from test_norm_vmap import S, compare_stack_with_loop
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.causal import CausalGroupNorm, CausalInstanceNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm

N, T = 4, 9
NORMS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "instance": (lambda: CausalInstanceNorm(C, eps=EPS), C),
    "group": (lambda: CausalGroupNorm(C, num_groups=2, eps=EPS), 2),
    "one_group": (lambda: CausalGroupNorm(C, num_groups=1, eps=EPS), 1),
}


def make(name: str, dtype: torch.dtype = torch.double) -> nn.Module:
    return randomize(NORMS[name][0]().to(dtype))


def prefix_by_prefix(norm: nn.Module, num_groups: int, x: Tensor) -> Tensor:
    """The textbook formula, once per position, on the sequence cut there; x (N, C, T)."""
    outputs = []
    for t in range(x.shape[2]):
        groups = x[:, :, : t + 1].unflatten(1, (num_groups, -1))  # (N, G, C/G, t + 1)
        mean = groups.mean(dim=(2, 3), keepdim=True)
        var = (groups - mean).square().mean(dim=(2, 3), keepdim=True)
        outputs.append(((groups - mean) / (var + EPS).sqrt()).flatten(1, 2)[:, :, t])
    state = dict(norm.named_parameters())
    return torch.stack(outputs, dim=2) * state["weight"][:, None] + state["bias"][:, None]


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("name", NORMS)
def test_output_and_gradients_equal_the_formula_on_each_prefix(name, offset):
    norm = make(name)
    x = (random_tensor(N, C, T) + offset).requires_grad_()
    out, expected = norm(x), prefix_by_prefix(norm, NORMS[name][1], x)
    assert_close(out, expected, rtol=0, atol=1e-10)
    inputs = [x, *norm.parameters()]
    assert_close(gradients(out, inputs), gradients(expected, inputs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("change", [1.0, 1e6, float("nan")])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_a_later_position_moves_nothing_earlier(name, training, change):
    norm = make(name, torch.float).train(training)
    x = random_tensor(N, C, T, dtype=torch.float)
    before = norm(x)
    for first in range(1, T):
        changed = x.clone()
        changed[:, :, first:] += change
        assert torch.equal(norm(changed)[:, :, :first], before[:, :, :first])


@pytest.mark.parametrize("name", NORMS)
def test_no_gradient_reaches_a_later_position(name):
    x = random_tensor(N, C, T).requires_grad_()
    (gradient,) = gradients(make(name)(x)[:, :, :4], [x])
    assert not gradient[:, :, 4:].any()
    assert gradient[:, :, :4].any()


@pytest.mark.parametrize("name", NORMS)
def test_another_sample_moves_nothing(name):
    norm, x = make(name), random_tensor(N, C, T)
    changed = x.clone()
    changed[1] *= 5
    out, moved = norm(x), norm(changed)
    assert torch.equal(out[[0, 2, 3]], moved[[0, 2, 3]])


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_last_position_equals_group_norm_over_the_sequence(num_groups):
    ours = randomize(CausalGroupNorm(C, num_groups=num_groups).double())
    theirs = nn.GroupNorm(num_groups, C).double()
    theirs.load_state_dict(ours.state_dict())
    x = random_tensor(N, C, T)
    assert_close(ours(x)[:, :, -1], theirs(x)[:, :, -1], rtol=0, atol=1e-12)


def test_group_norm_with_as_many_groups_as_channels_is_instance_norm():
    x = random_tensor(N, C, T)
    groups, instances = CausalGroupNorm(C, num_groups=C), CausalInstanceNorm(C)
    assert_close(groups(x), instances(x), rtol=0, atol=0)


def test_first_position_of_instance_norm_is_the_bias():
    norm = make("instance")
    out = norm(random_tensor(N, C, T))
    assert torch.equal(out[:, :, 0], norm.state_dict()["bias"].expand(N, C))


def test_group_norm_on_one_position_is_group_norm():
    ours, theirs = (kind(C, num_groups=2).double() for kind in (CausalGroupNorm, GroupNorm))
    x, mask = random_tensor(N, C), torch.tensor([True, False, True, True])
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)
    assert_close(ours(x, mask), theirs(x, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [0.0, 1e3])
@pytest.mark.parametrize("name", NORMS)
def test_float32_far_from_zero_is_close_to_float64(name, start):
    """E[x^2] - E[x]^2 would be off by 0.1 there, which is all of the variance times 0.1."""
    x = random_tensor(2, C, 512, dtype=torch.float) + start
    out, expected = make(name, torch.float)(x), make(name)(x.double())
    assert_close(out.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", NORMS)
def test_constant_sequence_is_the_bias_with_finite_gradients(name):
    norm = make(name)
    x = torch.full((N, C, T), 7.0, dtype=torch.double, requires_grad=True)
    out = norm(x)
    assert torch.equal(out, norm.state_dict()["bias"][:, None].expand(N, C, T))
    assert gradients(out, [x])[0].isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_bf16_is_the_float32_result_rounded(name, masked):
    norm = make(name, torch.float)
    x = random_tensor(N, C, T, dtype=torch.float).bfloat16() + 30
    mask = random_mask(N, T) if masked else None
    out = norm(x, mask)
    assert out.dtype == torch.bfloat16
    assert_close(out, norm(x.float(), mask).bfloat16(), rtol=0, atol=0)


def holed_mask() -> Tensor:
    """Padding in front, behind and in between; one sample without a real position."""
    mask = random_mask(N, T)
    mask[0, :3], mask[1, 6:], mask[2] = False, False, False
    return mask


@pytest.mark.parametrize("name", NORMS)
def test_masked_sample_equals_its_real_positions_alone(name):
    norm = make(name)
    x, mask = random_tensor(N, C, T), holed_mask()
    out = norm(x, mask)
    for sample, sample_out, real in zip(x, out, mask, strict=True):
        if real.any():
            alone = norm(sample[None, :, real])[0]
            assert_close(sample_out[:, real], alone, rtol=0, atol=1e-12)
        assert not sample_out[:, ~real].any()


@pytest.mark.parametrize("content", [1e9, float("inf"), float("nan")])
@pytest.mark.parametrize("name", NORMS)
def test_content_under_the_mask_moves_nothing(name, content):
    norm, mask = make(name), holed_mask()
    clean = random_tensor(N, C, T).requires_grad_()
    soiled = torch.where(mask.unsqueeze(1), clean.detach(), content).requires_grad_()
    outputs = [norm(x, mask) for x in (clean, soiled)]
    assert torch.equal(outputs[0], outputs[1])
    grads = [
        gradients(out, [x, *norm.parameters()])
        for out, x in zip(outputs, (clean, soiled), strict=True)
    ]
    assert_close(grads[1], grads[0], rtol=0, atol=0)
    assert not grads[1][0].movedim(1, -1)[~mask].any()


@pytest.mark.parametrize("name", NORMS)
def test_amount_of_padding_moves_nothing(name):
    norm = make(name)
    x, mask = random_tensor(N, C, T), holed_mask()
    longer = norm(nn.functional.pad(x, (0, 4), value=77), nn.functional.pad(mask, (0, 4)))
    assert torch.equal(longer[:, :, :T], norm(x, mask))
    assert not longer[:, :, T:].any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_stacked_norms_equal_norms_alone(name, masked):
    mask = random_mask(S * N, T).unflatten(0, (S, N)) if masked else None
    compare_stack_with_loop(NORMS[name][0], random_tensor(S, N, C, T), mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_token_site_does_not_depend_on_the_split(name, masked):
    x, mask = random_tensor(7, T, C), random_mask(7, T) if masked else None
    factory = NormFactory(lambda _: make(name), view="sequence", norm_batch_size=3)
    split = factory.tokens(C)
    whole = copy.deepcopy(split)
    whole.norm_batch_size = None
    assert_close(split(x, mask), whole(x, mask), rtol=0, atol=1e-14)
    alone = split.norm(x.transpose(1, 2), mask).transpose(1, 2)
    assert_close(whole(x, mask), alone, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [CausalInstanceNorm(C), CausalGroupNorm(C, num_groups=2)])
def test_maps_are_refused(norm):
    with pytest.raises(UserError, match=r"needs one positions axis \(N, C, T\).* has 2"):
        norm(torch.zeros(N, C, 3, 3))


def test_one_value_per_statistic_is_refused_in_training_only():
    norms = [
        (CausalInstanceNorm(C), "causal instance norm needs positions to pool"),
        (CausalGroupNorm(C, num_groups=C), "num_groups=8 leaves one value per group"),
    ]
    for norm, message in norms:
        with pytest.raises(UserError, match=message):
            norm(torch.zeros(N, C, 1))
        assert torch.equal(norm.eval()(torch.ones(N, C, 1)), torch.zeros(N, C, 1))


def test_instance_norm_without_positions_is_refused():
    with pytest.raises(UserError, match="causal instance norm needs positions to pool"):
        CausalInstanceNorm(C).eval()(torch.zeros(N, C))


@pytest.mark.parametrize(
    ("bare", "plain"),
    [
        (CausalInstanceNorm(C, affine=False), CausalInstanceNorm(C)),
        (CausalGroupNorm(C, num_groups=2, affine=False), CausalGroupNorm(C, num_groups=2)),
    ],
)
def test_without_affine_weight_is_one_and_bias_zero(bare, plain):
    x = random_tensor(N, C, T)
    assert not list(bare.parameters())
    assert_close(bare(x), plain(x), rtol=0, atol=0)
