"""Compatibility with DistributedDataParallel: two processes on one machine, over gloo."""

from __future__ import annotations

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from normexp.checks.card import PASSED, Finding, failed
from normexp.checks.subject import Shape, Subject, relative_change, show, values

WORLD = 2
STEPS = 3
LIMIT = timedelta(seconds=60)


class Behind(nn.Module):
    """The norm behind a linear layer, as DDP takes no module without parameters."""

    def __init__(self, norm: nn.Module, num_features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_features, num_features, dtype=torch.float64)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:  # (N, C, *)
        return self.norm(self.layer(x.movedim(1, -1)).movedim(-1, 1))


def trains_alike(subject: Subject) -> Finding:
    """Both ranks get the mean of the gradients that each has alone, and train some steps."""
    shape = subject.largest
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_work, args=(folder, subject, shape), nprocs=WORLD)
        except Exception as error:  # of a process: the last line of its traceback
            reason = str(error).strip().splitlines()[-1]
            return failed(f"{reason.removeprefix('AssertionError: ')}, {show(shape)}")
    return PASSED


def _work(rank: int, folder: str, subject: Subject, shape: Shape) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", timeout=LIMIT, rank=rank, world_size=WORLD
    )
    try:
        alone, network = (_build(subject, shape) for _ in range(2))
        shared = DistributedDataParallel(network)
        for step in range(STEPS):
            x = values(shape, torch.float64, seed=WORLD * step + rank)
            for module in (alone, shared):
                module.zero_grad()
                (module(x) * values(shape, torch.float64, seed=99)).sum().backward()
            _compare_gradients(alone, network)
            # What DDP does at the next forward: the first rank's state for all.
            for buffer in alone.buffers():
                dist.broadcast(buffer, 0)
    finally:
        dist.destroy_process_group()


def _build(subject: Subject, shape: Shape) -> Behind:
    torch.default_generator.manual_seed(0)
    return Behind(subject.trained(shape, torch.float64), shape[1])


def _compare_gradients(alone: nn.Module, shared: nn.Module) -> None:
    pairs = zip(alone.named_parameters(), shared.parameters(), strict=True)
    for (name, own), common in pairs:
        if own.grad is None or common.grad is None:
            continue
        mean = own.grad.clone()
        dist.all_reduce(mean)
        mean /= WORLD
        if relative_change(mean, common.grad) > 1e-9:
            raise AssertionError(f"the gradient of {name} is not the mean of both ranks")
