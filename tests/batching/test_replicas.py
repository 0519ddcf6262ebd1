from __future__ import annotations

import torch
from torch import nn

from normexp.batching.replicas import (
    SMALL_FORWARD,
    InTurn,
    Stacked,
    stacking_pays,
    suitable_threads,
)
from normexp.norms.factory import ResidualScale


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


def test_a_small_network_is_stacked_and_gets_one_thread_for_its_training():
    sizes = (SMALL_FORWARD, SMALL_FORWARD + 1)
    assert [stacking_pays("cpu", 4, size) for size in sizes] == [True, False]
    assert stacking_pays("cuda", 4, SMALL_FORWARD + 1) and not stacking_pays("cpu", 1, 10)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for size, threads in zip(sizes, (1, 2), strict=True):
            with suitable_threads(size):
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
