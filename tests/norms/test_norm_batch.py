"""Batch norm: running averages, ghost groups, and the state of a step that was run in parts."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_cases import C, gradients, random_mask, random_tensor, randomize
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms import batch as moments
from normexp.norms.batch import BatchNorm
from normexp.norms.state import merge_state, read_state, write_state

G, N, T = 3, 4, 5


def state_of(norm: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in norm.state_dict().items()}


def torch_after_one_forward(start: BatchNorm, values: Tensor) -> dict[str, Tensor]:
    """State of torch's batch norm after one forward on values (number, C), begun as `start`."""
    theirs = nn.BatchNorm1d(C, eps=start.eps, momentum=start.momentum).double()
    theirs.load_state_dict(start.state_dict())
    theirs(values)
    return state_of(theirs)


def random_groups(masked: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """x (G, N, C, T), its mask, and its real values (number, C); groups lie far apart."""
    x = random_tensor(G, N, C, T) + 5 * torch.arange(G).view(G, 1, 1, 1)
    mask = random_mask(G * N, T).unflatten(0, (G, N)) if masked else None
    rows = x.movedim(2, -1)
    return x, mask, rows.flatten(0, 2) if mask is None else rows[mask]


def test_running_averages_after_one_step_follow_the_update_rule():
    x = 2 * random_tensor(64, C) + 3
    norm = BatchNorm(C, momentum=0.25).double()
    norm(x)
    assert_close(norm.running_mean, 0.25 * x.mean(dim=0), rtol=0, atol=1e-12)
    expected = 0.75 + 0.25 * x.var(dim=0, correction=1)
    assert_close(norm.running_var, expected, rtol=0, atol=1e-12)
    assert norm.num_batches_tracked == 1
    assert norm.num_values == 64


def test_momentum_null_averages_all_steps_equally_as_torch_does():
    ours, theirs = BatchNorm(C, momentum=None).double(), nn.BatchNorm1d(C, momentum=None).double()
    for step in range(3):
        x = random_tensor(6, C, seed=step)
        for norm in (ours, theirs):
            norm(x)
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)


def test_without_running_averages_evaluation_uses_the_batch_as_torch_does():
    ours = BatchNorm(C, track_running_stats=False).double().eval()
    theirs = nn.BatchNorm1d(C, track_running_stats=False).double().eval()
    x = random_tensor(6, C, T)
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)
    assert set(ours.state_dict()) == set(theirs.state_dict()) == {"weight", "bias"}
    assert ours.merge_state({}, [{}, {}], [0.5, 0.5]) == {}


@pytest.mark.parametrize("momentum", [0.0, -0.1, 1.5])
def test_momentum_outside_its_range_is_refused(momentum):
    with pytest.raises(UserError, match=r"momentum=.* is not in \(0, 1\]"):
        BatchNorm(C, momentum=momentum)


@pytest.mark.parametrize("shape", [(1, C), (1, C, 1, 1)])
def test_one_value_per_channel_is_refused_in_training_only(shape):
    norm = BatchNorm(C)
    with pytest.raises(UserError, match="one value per channel"):
        norm(torch.zeros(shape))
    assert norm.num_batches_tracked == 0
    norm.eval()(torch.zeros(shape))


def test_groups_of_one_value_per_channel_are_refused():
    with pytest.raises(UserError, match="one value per channel"):
        BatchNorm(C).forward_groups(torch.zeros(4, 1, C))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loop_from", [0, 2**16], ids=["looped", "folded"])
def test_groups_in_one_call_equal_each_group_alone(monkeypatch, loop_from, masked, momentum):
    monkeypatch.setattr(moments, "LOOP_FROM_ELEMENTS", loop_from)
    grouped = randomize(BatchNorm(C, momentum=momentum).double())
    start = copy.deepcopy(grouped)
    x, mask, values = random_groups(masked)
    x.requires_grad_()
    alone = copy.deepcopy(grouped)
    masks = [None] * G if mask is None else mask
    expected = torch.stack([alone(part, own) for part, own in zip(x, masks, strict=True)])
    out = grouped.forward_groups(x, mask)
    assert_close(out, expected, rtol=0, atol=1e-12)
    found = gradients(out, [x, *grouped.parameters()])
    assert_close(found, gradients(expected, [x, *alone.parameters()]), rtol=0, atol=1e-12)
    expected_state = torch_after_one_forward(start, values)
    assert_close(grouped.state_dict(), expected_state, rtol=0, atol=1e-12)
    assert grouped.num_values == len(values)


def test_a_group_of_padding_alone_does_not_weigh():
    x, mask, _ = random_groups(masked=True)
    assert mask is not None
    mask[1] = False
    norm = randomize(BatchNorm(C).double())
    expected = torch_after_one_forward(norm, x.movedim(2, -1)[mask])
    norm.forward_groups(x, mask)
    assert_close(norm.state_dict(), expected, rtol=0, atol=1e-12)


def test_groups_in_evaluation_use_the_running_averages():
    norm = randomize(BatchNorm(C).double()).eval()
    x, mask, _ = random_groups(masked=True)
    assert mask is not None
    assert_close(norm.forward_groups(x, mask)[1], norm(x[1], mask[1]), rtol=0, atol=0)


def test_small_groups_are_folded_and_large_ones_looped():
    assert not moments.loops_over_groups(torch.Size((64, 2, 24, 32, 32)))
    assert moments.loops_over_groups(torch.Size((16, 8, 24, 32, 32)))
    assert not moments.loops_over_groups(torch.Size((64, 2, 16, 8, 8)))


def run_in_parts(norm: nn.Module, parts: list[Tensor], masks: list[Tensor | None]):
    """States at the start of a step and after each of its parts, all begun from the start."""
    start, ends = read_state(norm), []
    for part, mask in zip(parts, masks, strict=True):
        norm(part, mask)
        ends.append(read_state(norm))
        write_state(norm, start)
    return start, ends


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.003, None])
@pytest.mark.parametrize("masked", [False, True])
def test_merged_parts_equal_one_forward_on_all_values(masked, momentum):
    """Parts of 5, 2 and 4 samples, so none weighs as another."""
    norm = randomize(BatchNorm(C, momentum=momentum).double())
    x = random_tensor(11, C, T) + 3 * torch.arange(11).view(-1, 1, 1)
    mask = random_mask(11, T) if masked else None
    parts = list(x.split([5, 2, 4]))
    masks: list[Tensor | None] = [None] * 3 if mask is None else [*mask.split([5, 2, 4])]
    rows = x.movedim(1, -1)
    values = rows.flatten(0, 1) if mask is None else rows[mask]
    expected = torch_after_one_forward(norm, values)
    start, ends = run_in_parts(norm, parts, masks)
    merged = merge_state(norm, start, ends, [5 / 11, 2 / 11, 4 / 11])
    assert merged.pop("num_values") == len(values)
    expected = {name: expected[name] for name in merged}
    assert_close(merged, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_merged_replicas_equal_each_merged_alone(momentum):
    runs, norm = [], BatchNorm(C, momentum=momentum).double()
    for replica in range(3):
        parts = [random_tensor(n, C, seed=10 * replica + n) for n in (6, 3)]
        runs.append(run_in_parts(randomize(norm, seed=replica), parts, [None, None]))
    alone = [norm.merge_state(start, ends, [2 / 3, 1 / 3]) for start, ends in runs]
    start = {name: torch.stack([run[0][name] for run in runs]) for name in runs[0][0]}
    ends = [{k: torch.stack([run[1][i][k] for run in runs]) for k in start} for i in range(2)]
    merged = norm.merge_state(start, ends, [2 / 3, 1 / 3])
    for name, value in merged.items():
        assert_close(value, torch.stack([own[name] for own in alone]), rtol=0, atol=1e-14)


def test_parts_of_padding_alone_leave_the_start():
    norm = randomize(BatchNorm(C).double())
    empty = torch.zeros(4, T, dtype=torch.bool)
    start, ends = run_in_parts(norm, [random_tensor(4, C, T)] * 2, [empty, empty])
    merged = norm.merge_state(start, ends, [0.5, 0.5])
    for name in ("running_mean", "running_var"):
        assert torch.equal(merged[name], start[name])


def test_norm_may_be_called_twice_before_a_backward():
    """As a module that a model shares between two places is; its kernel keeps its buffers."""
    norm, other = randomize(BatchNorm(C).double()), nn.BatchNorm1d(C, eps=1e-5).double()
    other.load_state_dict(norm.state_dict())
    x = random_tensor(6, C).requires_grad_()
    (a, *of_ours), (b, *of_torch) = (
        gradients(n(x) + n(x.square()), [x, *n.parameters()]) for n in (norm, other)
    )
    assert_close(a, b)
    assert_close(of_ours, of_torch)
    assert_close(norm.running_var, other.running_var)


def test_buffers_keep_no_graph_and_survive_a_copy_and_a_cast():
    norm = BatchNorm(C)
    norm(random_tensor(70_000, C, dtype=torch.float).requires_grad_())
    assert all(buffer.grad_fn is None for buffer in norm.buffers())
    assert copy.deepcopy(norm).bfloat16().num_values == 70_000
