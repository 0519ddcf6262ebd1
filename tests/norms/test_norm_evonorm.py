"""EvoNorm B0's running state and ghost groups, and what both EvoNorms refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_cases import C, gradients, random_mask, random_tensor, randomize
from test_norm_vmap import S, compare_stack_with_loop
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.evonorm import EvoNormB0, EvoNormS0
from normexp.norms.site import Site
from normexp.norms.state import read_state, write_state

G, N, T = 3, 4, 5


def groups(masked: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """x (G, N, C, T), its mask, and its real values (number, C); samples lie far apart."""
    x = random_tensor(G, N, C, T) + torch.arange(G * N).view(G, N, 1, 1)
    mask = random_mask(G * N, T).unflatten(0, (G, N)) if masked else None
    rows = x.movedim(2, -1)
    return x, mask, rows.flatten(0, 2) if mask is None else rows[mask]


def averages_after_one_forward(start: EvoNormB0, values: Tensor) -> dict[str, Tensor]:
    """Those of torch's batch norm on values (number, C), begun as `start`."""
    theirs = nn.BatchNorm1d(C, momentum=start.momentum, affine=False).double()
    theirs.load_state_dict({key: start.state_dict()[key] for key in theirs.state_dict()})
    theirs(values)
    return theirs.state_dict()


def averages(norm: EvoNormB0) -> dict[str, Tensor]:
    keep = ("running_mean", "running_var", "num_batches_tracked")
    return {name: norm.state_dict()[name] for name in keep}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("masked", [False, True])
def test_groups_in_one_call_equal_each_group_alone(masked, momentum):
    norm = randomize(EvoNormB0(C, momentum=momentum).double())
    x, mask, values = groups(masked)
    x.requires_grad_()
    expected_averages = averages_after_one_forward(norm, values.detach())
    alone = copy.deepcopy(norm)
    masks = [None] * G if mask is None else mask
    expected = torch.stack([alone(part, own) for part, own in zip(x, masks, strict=True)])
    out = norm.forward_groups(x, mask)
    assert_close(out, expected, rtol=0, atol=1e-12)
    found = gradients(out, [x, *norm.parameters()])
    assert_close(found, gradients(expected, [x, *alone.parameters()]), rtol=0, atol=1e-12)
    assert_close(averages(norm), expected_averages, rtol=0, atol=1e-12)
    assert norm.num_values == len(values)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("masked", [False, True])
def test_merged_parts_equal_one_forward_on_all_values(masked, momentum):
    norm = randomize(EvoNormB0(C, momentum=momentum).double())
    x, mask, values = groups(masked)
    expected = averages_after_one_forward(norm, values)
    flat, flat_mask = x.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
    start, ends = read_state(norm), []
    for first, last in [(0, 5), (5, 12)]:
        norm(flat[first:last], None if flat_mask is None else flat_mask[first:last])
        ends.append(read_state(norm))
        write_state(norm, start)
    merged = norm.merge_state(start, ends, [5 / 12, 7 / 12])
    assert_close({name: merged[name] for name in expected}, expected, rtol=0, atol=1e-12)


def test_evaluation_divides_by_the_running_variance():
    norm = randomize(EvoNormB0(C).double()).eval()
    with torch.no_grad():
        norm.v.fill_(-100.0)  # so that the batch's side is the larger one at positive values
    x = random_tensor(N, C, T).abs() + 1
    expected = x / (norm.running_var + norm.eps).sqrt()[:, None]
    parameters = dict(norm.named_parameters())
    expected = expected * parameters["weight"][:, None] + parameters["bias"][:, None]
    assert_close(norm(x), expected, rtol=0, atol=1e-12)
    x, mask, _ = groups(masked=True)
    assert mask is not None
    assert_close(norm.forward_groups(x, mask)[1], norm(x[1], mask[1]), rtol=0, atol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_stacked_sites_split_into_groups_equal_sites_alone(size, masked):
    mask = random_mask(S * 6, 5).unflatten(0, (S, -1)) if masked else None
    make = lambda: Site(EvoNormB0(C), "map", size)  # noqa: E731
    compare_stack_with_loop(make, random_tensor(S, 6, C, 5), mask)


def test_buffers_keep_no_graph():
    norm = EvoNormB0(C)
    norm(random_tensor(6, C, dtype=torch.float).requires_grad_())
    assert all(buffer.grad_fn is None for buffer in norm.buffers())


def test_a_batch_of_padding_alone_leaves_running_averages():
    norm = randomize(EvoNormB0(C).double())
    before = averages(copy.deepcopy(norm))
    assert not norm(random_tensor(N, C, T), mask=torch.zeros(N, T, dtype=torch.bool)).any()
    assert torch.equal(norm.running_var, before["running_var"])


def test_one_value_per_statistic_is_refused():
    with pytest.raises(UserError, match="one value per channel"):
        EvoNormB0(C)(torch.zeros(1, C))
    with pytest.raises(UserError, match="num_groups=8 leaves one value per group"):
        EvoNormS0(C, num_groups=C)(torch.zeros(4, C, 1, 1))


def test_groups_that_do_not_divide_are_refused_or_replaced():
    with pytest.raises(UserError, match="num_groups=3 does not divide num_features=8"):
        EvoNormS0(C, num_groups=3)
    assert EvoNormS0(C, num_groups=3, groups_policy="nearest").num_groups == 2
