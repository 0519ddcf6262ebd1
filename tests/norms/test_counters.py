"""Counters of norms: as torch's, and moved in one operation a step."""

from __future__ import annotations

import pytest
import torch
from norm_cases import C, make_fresh, random_tensor
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normexp.batching.replicas import InTurn, Stacked
from normexp.norms.site import Site


class CountsWrites(TorchDispatchMode):
    """Counts the operations that add to integers in place."""

    num_writes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ARG002
        if func.name().startswith(("aten::add_.", "aten::fill_.", "aten::_foreach_add_.")):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            self.num_writes += not first.is_floating_point()
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize("form", [Stacked, InTurn])
def test_all_counters_of_a_step_move_in_one_operation(form):
    networks = [nn.Sequential(*(Site(make_fresh("batch"), "map", 2) for _ in "abc")) for _ in "xy"]
    replicas, batch = form(networks), {"inputs": random_tensor(2, 6, C, 5)}
    with CountsWrites() as counts:
        replicas.add_gradient(batch, lambda y, _: y.square().sum(), 1.0)
    assert counts.num_writes == 1


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
