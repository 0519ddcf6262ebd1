"""Replicas stacked under vmap compute what each computes alone."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_cases import CASES, SHAPES, C, gradients, random_mask, random_tensor, randomize
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.testing import assert_close

from normexp.norms.batch import BatchNorm
from normexp.norms.site import Site

S = 3


def compare_stack_with_loop(make, x, mask=None):
    """Output, gradients and buffers of S norms, together and one after another; x (S, N, C, *)."""
    alone = [randomize(make().double(), seed=k) for k in range(S)]
    network = copy.deepcopy(alone[0])
    parameters, buffers = stack_module_state(alone)

    def one(parameters, buffers, x, mask):
        arguments = (x,) if mask is None else (x, mask)
        return functional_call(network, (parameters, buffers), arguments)

    x = x.clone().requires_grad_()
    out = vmap(one, in_dims=(0, 0, 0, None if mask is None else 0))(parameters, buffers, x, mask)
    expected = torch.stack(
        [norm(x[k]) if mask is None else norm(x[k], mask[k]) for k, norm in enumerate(alone)]
    )
    assert_close(out, expected, rtol=0, atol=1e-12)
    names = list(parameters)
    found = gradients(out, [x, *(parameters[name] for name in names)])
    own = [dict(norm.named_parameters())[name] for name in names for norm in alone]
    single = gradients(expected, [x, *own])
    assert_close(found[0], single[0], rtol=0, atol=1e-12)
    for i, gradient in enumerate(found[1:]):
        rows = torch.stack(single[1 + i * S : 1 + (i + 1) * S])
        assert_close(gradient, rows, rtol=0, atol=1e-12)
    for name, buffer in buffers.items():
        rows = torch.stack([dict(norm.named_buffers())[name] for norm in alone])
        assert_close(buffer, rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_dims", [3, 4])
@pytest.mark.parametrize("name", CASES)
def test_stacked_norms_equal_norms_alone(name, num_dims, masked, training):
    shape = SHAPES[num_dims]
    mask = random_mask(S * shape[0], *shape[2:]).unflatten(0, (S, -1)) if masked else None
    x = random_tensor(S, *shape)
    compare_stack_with_loop(lambda: CASES[name].make().train(training), x, mask)


@pytest.mark.parametrize("name", ["batch", "layer", "layer2d", "group", "rms", "none"])
def test_stacked_norms_equal_norms_alone_on_single_positions(name):
    compare_stack_with_loop(CASES[name].make, random_tensor(S, 6, C))


def test_stacked_batch_norms_average_all_steps_equally():
    compare_stack_with_loop(lambda: BatchNorm(C, momentum=None), random_tensor(S, 6, C))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_stacked_sites_split_into_groups_equal_sites_alone(size, masked):
    """Size 4 leaves a ragged group, so that running averages are merged under vmap as well."""
    mask = random_mask(S * 6, 5).unflatten(0, (S, -1)) if masked else None
    make = lambda: Site(BatchNorm(C), "map", size)  # noqa: E731
    compare_stack_with_loop(make, random_tensor(S, 6, C, 5), mask)


@pytest.mark.parametrize(
    ("name", "view"),
    [(name, "sequence") for name in CASES] + [(n, "token") for n in CASES if n != "instance"],
)
def test_stacked_token_sites_with_padding_equal_sites_alone(name, view):
    mask = random_mask(S * 6, 5).unflatten(0, (S, -1))
    make = lambda: Site(CASES[name].make(), view, None)  # noqa: E731
    compare_stack_with_loop(make, random_tensor(S, 6, 5, C), mask)


def test_a_norm_that_was_stacked_can_be_copied():
    norms: list[nn.Module] = [BatchNorm(C) for _ in range(S)]
    parameters, buffers = stack_module_state(norms)
    vmap(lambda p, b, x: functional_call(norms[0], (p, b), (x,)))(
        parameters, buffers, random_tensor(S, 6, C, dtype=torch.float)
    )
    copy.deepcopy(norms[0])
    assert buffers["num_batches_tracked"].tolist() == [1, 1, 1]
    assert not buffers["running_mean"].requires_grad
