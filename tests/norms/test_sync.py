"""Synchronized batch norm over two processes is batch norm over what both have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from norm_cases import C, gradients, random_mask, random_tensor, randomize
from torch.testing import assert_close

from normexp.norms.batch import BatchNorm
from normexp.norms.sharing import SyncBatchNorm

SPLIT = (4, 2)  # samples of each process


def random_batch(masked: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = random_tensor(sum(SPLIT), C, 5) + 3 * torch.arange(sum(SPLIT)).view(-1, 1, 1)
    return x, random_mask(sum(SPLIT), 5) if masked else None


def work(rank: int, store: str, folder: str) -> None:
    """One process: its part of the batch, forward and backward, into a file."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for masked in (False, True):
        x, mask = random_batch(masked)
        g = random_tensor(*x.shape, seed=5)
        norm = randomize(SyncBatchNorm(C).double())
        own = x.split(SPLIT)[rank].requires_grad_()
        out = norm(own, None if mask is None else mask.split(SPLIT)[rank])
        loss = (out * g.split(SPLIT)[rank]).sum()
        grads = torch.autograd.grad(loss, [own, *norm.parameters()])
        result = {"out": out.detach(), "grads": grads, "state": norm.state_dict()}
        torch.save(result, Path(folder) / f"{rank}-{masked}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_batch_norm_over_their_union(tmp_path: Path):
    mp.spawn(work, (f"file://{tmp_path / 'store'}", str(tmp_path)), nprocs=2)
    for masked in (False, True):
        x, mask = random_batch(masked)
        norm = randomize(BatchNorm(C).double())
        x.requires_grad_()
        out = norm(x, mask)
        loss = (out * random_tensor(*x.shape, seed=5)).sum()
        expected = torch.autograd.grad(loss, [x, *norm.parameters()])
        parts = [torch.load(tmp_path / f"{rank}-{masked}.pt") for rank in (0, 1)]
        assert_close(torch.cat([part["out"] for part in parts]), out, rtol=0, atol=1e-12)
        x_grads, *of_parameters = zip(*(part["grads"] for part in parts), strict=True)
        assert_close(torch.cat(x_grads), expected[0], rtol=0, atol=1e-11)
        for found, whole in zip(of_parameters, expected[1:], strict=True):
            assert_close(sum(found), whole, rtol=0, atol=1e-11)
        for part in parts:
            assert_close(part["state"], norm.state_dict(), rtol=0, atol=1e-12)


def test_one_process_is_batch_norm():
    x = random_tensor(6, C, 5).requires_grad_()
    norms = [randomize(make(C).double()) for make in (SyncBatchNorm, BatchNorm)]
    (out, found), (expected, grads) = (
        (norm(x), gradients(norm(x), [x, *norm.parameters()])) for norm in norms
    )
    assert_close(out, expected, rtol=0, atol=1e-12)
    assert_close(found, grads, rtol=0, atol=1e-12)
