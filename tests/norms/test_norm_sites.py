"""A site in each view, with ghost sub-batches, over norms the project does and does not know."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_cases import (
    C,
    S,
    assert_stack_equals_loop,
    gradients,
    make,
    random_mask,
    random_tensor,
    randomize,
)
from torch import Tensor, nn
from torch.testing import assert_close
from wild_norms import StrangerNorm

from normexp.norms import kernel
from normexp.norms.batch import BatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.group import LayerNorm
from normexp.norms.site import Site


@pytest.mark.parametrize("size", [2, 4, 5])
def test_an_unknown_norm_is_split_as_a_loop_over_its_groups(size):
    """Ten samples: sizes 2 and 5 divide, 4 leaves a group of two that weighs two tenths."""
    norm = randomize(StrangerNorm(C).double())
    by_hand = copy.deepcopy(norm)
    x = random_tensor(10, C).requires_grad_()
    outputs, averages = [], []
    for part in x.split(size):
        fresh = copy.deepcopy(by_hand)
        fresh.weight = by_hand.weight
        outputs.append(fresh(part))
        averages.append(fresh.size * len(part) / 10)
    expected = torch.cat(outputs)
    site = Site(norm, "map", size)
    out = site(x)
    assert_close(out, expected, rtol=0, atol=1e-14)
    found = gradients(out, [x, norm.weight])
    assert_close(found, gradients(expected, [x, by_hand.weight]), rtol=0, atol=1e-14)
    assert_close(norm.size, torch.stack(averages).sum(dim=0), rtol=0, atol=1e-14)
    assert norm.count == 1
    assert torch.equal(site.eval()(x), norm(x))  # evaluation is not split


def shown(x: Tensor, view: str) -> Tensor:
    """As a norm sees x: maps as they are, tokens (B, T, C) in the view."""
    if view == "map":
        return x
    return x.transpose(1, 2) if view == "sequence" else x.flatten(0, 1)


@pytest.mark.parametrize("loop_from", [0, 2**16], ids=["looped", "folded"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("view", ["map", "token", "sequence"])
@pytest.mark.parametrize("size", [2, 4, None])
def test_batch_norm_is_split_by_sample_with_the_state_of_one_forward(
    size, view, masked, loop_from, monkeypatch
):
    """Seven samples leave a ragged group; under the mask two groups of 2 are of padding alone.

    torch's batch norm has the state.
    """
    monkeypatch.setattr(kernel, "LOOP_FROM_ELEMENTS", loop_from)
    x = random_tensor(7, 5, C) + torch.arange(7).view(7, 1, 1)
    x = (x.mT if view == "map" else x).requires_grad_()
    mask = random_mask(7, 5) & (torch.arange(7) < 4)[:, None] if masked else None
    site = Site(randomize(BatchNorm(C).double()), view, size)
    alone, theirs = copy.deepcopy(site.norm), nn.BatchNorm1d(C).double()
    theirs.load_state_dict(alone.state_dict())
    out, parts = site(x, mask), []
    for i in range(0, 7, size or 7):
        part = slice(i, i + (size or 7))
        real = None if mask is None else mask[part].view(shown(x[part], view)[:, 0].shape)
        parts.append(alone(shown(x[part], view), real))
        assert_close(shown(out[part], view), parts[-1], rtol=0, atol=1e-12)
    weight = random_tensor(*out.shape, seed=11)
    weights = [shown(own, view) for own in weight.split(size or 7)]
    loss = sum((own * part).sum() for own, part in zip(weights, parts, strict=True))
    expected = torch.autograd.grad(loss, [x, *alone.parameters()])
    assert_close(gradients(out, [x, *site.parameters()]), expected, rtol=0, atol=1e-12)
    values = (x.mT if view == "map" else x).flatten(0, 1)
    values = values if mask is None else values[mask.flatten()]
    theirs(values)
    assert_close(site.norm.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
    assert site.norm.num_values == len(values)


def test_torch_batch_norm_in_ghost_batches_has_the_gradients_of_each_group():
    """Its kernel keeps the running averages for its backward; writing them before would raise."""
    x = random_tensor(7, C, 3, 3).requires_grad_()
    norm = nn.BatchNorm2d(C).double()
    expected = torch.cat([copy.deepcopy(norm)(part) for part in x.split(3)])
    found = gradients(Site(norm, "map", 3)(x), [x])
    assert_close(found, gradients(expected, [x]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("view", ["token", "sequence"])
@pytest.mark.parametrize("name", ["batch", "evonorm_b0", "switchable", "batch_per_position"])
def test_stacked_sites_in_ragged_groups_equal_sites_alone(name, view, masked):
    """Seven samples in groups of 4 and 3, so that states are merged under vmap as well."""
    if name == "batch_per_position" and view == "token":
        pytest.skip("takes sequences alone")
    mask = random_mask(S * 7, 5).unflatten(0, (S, -1)) if masked else None
    sites: list[nn.Module] = [Site(make(name, seed=k), view, 4) for k in range(S)]
    assert_stack_equals_loop(sites, random_tensor(S, 7, 5, C), mask)


@pytest.mark.parametrize(("view", "axes"), [("token", (2,)), ("sequence", (1, 2))])
def test_layer_norm_pools_a_token_or_in_view_sequence_a_sample(view, axes):
    x = random_tensor(4, 5, C)
    site = NormFactory(lambda n: LayerNorm(n).double(), view=view).tokens(C)
    var, mean = torch.var_mean(x, dim=axes, correction=0, keepdim=True)
    assert_close(site(x), (x - mean) / (var + 1e-5).sqrt(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("name", ["batch", "frozen", "batch_per_position"])
def test_a_stack_folded_into_channels_equals_each_norm_alone(
    name, size, shared, training, monkeypatch
):
    monkeypatch.setattr(kernel, "FOLD_FROM_ELEMENTS", 0)
    sites: list[nn.Module] = [
        Site(make(name, seed=k), "map", size).train(training) for k in range(S)
    ]
    x = random_tensor(*([] if shared else [S]), 4, C, 5)
    assert_stack_equals_loop(sites, x, shared=shared, bends=True)
