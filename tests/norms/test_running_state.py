"""Running averages answer to what code around a network asks of torch's batch norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normexp.norms.batch import BatchNorm, GhostBatchNorm, SyncBatchNorm
from normexp.norms.site import Site
from normexp.norms.zoo.batch import EvalNorm

NORMS = {
    "batch": lambda: BatchNorm(4),
    "ghost": lambda: GhostBatchNorm(4, ghost_size=4),
    "sync": lambda: SyncBatchNorm(4),
    "eval_norm": lambda: EvalNorm(4),
}


def inputs(seed: int):
    return 3 * torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) + seed


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("switch", [{"track_running_stats": False}, {"momentum": 0.0}])
@pytest.mark.parametrize("norm_batch_size", [None, 2])
def test_averages_that_are_held_stay_and_are_used(
    name: str, switch: dict[str, Any], norm_batch_size: int | None
):
    norm: Any = NORMS[name]()
    site = Site(norm, "map", norm_batch_size)
    first = site(inputs(1))
    held = {buffer: value.clone() for buffer, value in norm.named_buffers()}
    for attribute, value in switch.items():
        setattr(norm, attribute, value)
    torch.testing.assert_close(site(inputs(1)), first)  # the batch still normalizes
    site(inputs(2))
    for buffer, value in norm.named_buffers():
        assert torch.equal(value, held[buffer]), buffer
    expected = nn.BatchNorm1d(4).eval()
    if name != "eval_norm":
        expected.load_state_dict(norm.state_dict())
        torch.testing.assert_close(site.eval()(inputs(3)), expected(inputs(3)))


@pytest.mark.parametrize("name", NORMS)
def test_averages_that_are_reset_are_those_of_a_new_norm(name: str):
    norm: Any = NORMS[name]()
    norm(inputs(1))
    norm.reset_running_stats()
    for buffer, value in NORMS[name]().named_buffers():
        assert torch.equal(norm.get_buffer(buffer), value), buffer
