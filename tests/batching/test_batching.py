"""Draws, replicas and the three sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normexp.errors import UserError
from normexp.norms.parts import ResidualScale
from normexp.training.batching.draws import Dropout, derive_seed, generator
from normexp.training.batching.replicas import (
    LARGE_FORWARD,
    InTurn,
    Stacked,
    suitable_threads,
)
from normexp.training.config.sizes import Share, Sizes


def test_draws_are_functions_of_seed_stream_and_index_and_independent():
    assert derive_seed(3, "order", 5) == derive_seed(3, "order", 5)
    others = [derive_seed(4, "order", 5), derive_seed(3, "init", 5), derive_seed(3, "order", 6)]
    assert len({derive_seed(3, "order", 5), *others}) == 4
    rows = torch.stack([torch.randn(2000, generator=generator(s, "init")) for s in range(8)])
    correlation = torch.corrcoef(rows) - torch.eye(8)
    assert correlation.abs().max() < 0.1  # four standard errors of 1/sqrt(2000)


def dropout(p: float, key: int = 7) -> Dropout:
    module = Dropout(p)
    module.key.fill_(key)
    return module.train()


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_share_and_the_mean_without_a_pattern(p: float):
    x = torch.ones(300, 400)
    outputs = [dropout(p, key)(x) for key in (1, 2)]
    kept = [(y != 0).double() for y in outputs]
    limit = 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert kept[0].mean().item() == pytest.approx(1 - p, abs=limit)
    torch.testing.assert_close(outputs[0], kept[0].float() / (1 - p))
    noise = [mask - (1 - p) for mask in kept]
    pairs = [(noise[0][1:], noise[0][:-1]), (noise[0][:, 1:], noise[0][:, :-1]), tuple(noise)]
    for first, second in pairs:  # along rows, columns and keys
        assert (first * second).mean().abs() < limit


def test_dropout_of_a_part_is_that_part_of_the_whole_and_nothing_in_evaluation():
    x = torch.randn(8, 3, 4)
    whole = dropout(0.4)(x)
    part = dropout(0.4)
    part.first_sample.fill_(6)
    assert torch.equal(part(x[6:]), whole[6:])
    assert torch.equal(part.eval()(x), x)
    with pytest.raises(ValueError, match=r"dropout=1\.0"):
        Dropout(1.0)


def networks(count: int = 3) -> list[nn.Module]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double())
    return made


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["targets"], reduction="sum")


def batch(count: int = 3):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, 4, dtype=torch.double, generator=generator)
    return {"inputs": inputs, "targets": torch.randint(0, 2, (count, 6), generator=generator)}


def test_stacked_tensors_lead_with_the_replicas_and_a_replica_is_the_network_that_went_in():
    given = networks()
    for network in given:
        network.append(nn.Linear(5, 2).double())
        network[3].weight = network[2].weight  # shared
    stacked = Stacked(given)
    (tree,) = stacked.trees
    assert tree[0].weight.shape == (3, 5, 4)
    assert tree[1].running_mean.shape == (3, 5)
    assert tree[3].weight is tree[2].weight
    assert all(p.is_leaf and p.requires_grad for p in stacked.parameters())
    replica = stacked.replica(1)
    assert replica[3].weight is replica[2].weight
    torch.testing.assert_close(replica.state_dict(), given[1].state_dict(), rtol=0, atol=0)


def test_clipping_of_a_stack_is_clipping_of_each_replica():
    given, whole, others = networks(), batch(), networks()
    for network in (*given, *others):
        network.append(ResidualScale(2.0).double())  # a parameter without axes
    stacked, in_turn = Stacked(given), InTurn(others)
    for replicas in (stacked, in_turn):
        replicas.eval()  # torch's batch norm cannot write its running mean under vmap
        replicas.add_gradient(whole, loss, 1.0)
        before = replicas.gradient_norms()
        replicas.clip_gradients(1e3)  # below it nothing is scaled
        torch.testing.assert_close(replicas.gradient_norms(), before)
        replicas.clip_gradients(0.5)
    for index, network in enumerate(in_turn.trees):
        for name, parameter in network.named_parameters():
            mine = dict(stacked.trees[0].named_parameters())[name]
            assert mine.grad is not None and parameter.grad is not None
            torch.testing.assert_close(mine.grad[index], parameter.grad, rtol=1e-12, atol=1e-14)
        norm = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
        assert norm <= 0.5 + 1e-9


def test_only_a_large_network_trains_on_several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for size, threads in ((LARGE_FORWARD, 1), (LARGE_FORWARD + 1, 3)):
            with suitable_threads(size, 3):
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_null_reads_as_the_size_above():
    for typed, split in (((32,), (32, 32)), ((32, 8), (8, 8)), ((32, None, 4), (32, 4))):
        assert (Sizes(*typed).micro, Sizes(*typed).norm) == split


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 5), "micro_batch_size=5 does not divide batch_size=32; try micro_batch_size=4 or"),
        ((32, 8, 16), "norm_batch_size=16 does not divide micro_batch_size=8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_one_that_does(sizes, message: str):
    with pytest.raises(UserError, match=message):
        Sizes(*sizes)


def test_shares_of_a_step_hold_each_sample_once_in_whole_ghost_groups():
    assert Sizes(8, 4).micro_bounds(5) == [(0, 4), (4, 5)]
    for sizes, num_samples in ((Sizes(8, 4), 8), (Sizes(8, 4), 6), (Sizes(8), 3), (Sizes(12), 12)):
        bounds = [sizes.micro_bounds(num_samples, Share(index, 2)) for index in (0, 1)]
        taken = sorted(i for own in bounds for first, last in own for i in range(first, last))
        assert taken == list(range(num_samples))
        width = sizes.shared_by(2).norm
        assert all(first % width == 0 for own in bounds for first, _ in own)


def test_devices_split_statistics_as_ghost_sub_batches():
    for sizes, norm_batch_size in ((Sizes(32), 16), (Sizes(32, 8), 4), (Sizes(32, None, 4), 4)):
        shared = sizes.shared_by(2)
        assert (shared.batch_size, shared.micro) == (sizes.batch_size, sizes.micro)
        assert shared.norm == norm_batch_size
        assert sizes.shared_by(2, synchronized=True).norm == sizes.micro
    with pytest.raises(UserError, match="batch_size=32 cannot be shared evenly by 3 devices"):
        Sizes(32).shared_by(3)
    with pytest.raises(UserError, match="micro_batch_size=8 .* try 2"):
        Sizes(32, 8).shared_by(3)
