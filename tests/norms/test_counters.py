"""Counters of norms: as torch's."""

from __future__ import annotations

import pytest
import torch
from norm_cases import C, make_fresh, random_tensor
from torch import Tensor, nn

from normexp.norms.site import Site
from normexp.training.batching.replicas import InTurn, Stacked


class Network(nn.Module):
    """A norm that runs once, one that runs twice, one in ragged groups, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.once = Site(make_fresh("batch"), "map", 2)
        self.twice = Site(make_fresh("batch"), "map", None)
        self.ragged = Site(make_fresh("batch"), "map", 4)
        self.never = Site(make_fresh("batch"), "map", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.ragged(self.twice(self.twice(self.once(x)).relu()))


@pytest.mark.parametrize("form", [Stacked, InTurn])
def test_counters_rise_by_the_forwards_and_values_of_each_norm(form):
    replicas, batch = form([Network(), Network()]), {"inputs": random_tensor(2, 6, C, 5)}
    for _ in range(3):
        replicas.add_gradient(batch, lambda y, _: y.square().sum(), 1.0)
    state = dict(replicas.replica(1).named_buffers())
    for name, forwards in (("once", 1), ("twice", 2), ("ragged", 1), ("never", 0)):
        assert state[f"{name}.norm.num_batches_tracked"] == 3 * forwards
        assert state[f"{name}.norm.num_values"] == 3 * forwards * 6 * 5
    own = replicas.replica(1).train()
    own(batch["inputs"][1])  # outside of a step a norm moves its own
    assert own.get_submodule("once.norm").num_batches_tracked == 4


def test_a_step_that_fails_counts_nothing_and_leaves_later_forwards_alone():
    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    replicas, x = InTurn([nn.Sequential(make_fresh("batch"))]), random_tensor(1, 6, C)
    with pytest.raises(RuntimeError, match="out of memory"):
        replicas.add_gradient({"inputs": x}, fail, 1.0)
    (norm,) = replicas.trees[0]
    assert norm.num_batches_tracked == 0
    norm(x[0])
    assert torch.equal(norm.num_batches_tracked, torch.tensor(1))
