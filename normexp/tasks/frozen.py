"""Running a stack with frozen weights, and giving back whatever was borrowed of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from normexp.batching.draws import generator
from normexp.batching.replicas import Batch, Measured, Replicas
from normexp.data.dataset import Data
from normexp.norms.contract import named_sites
from normexp.norms.state import State, install_state, read_state, write_state

SPLITS = ("train", "val", "test")
# Samples per forward over all replicas: memory is shared by the stack.
STACK_SAMPLES = 512


def shuffled(data: Data, split: str) -> Tensor:
    """The samples of a split in a random order (N,).

    One order for every run, whatever its seed and norm, so that they are compared on the same
    batches.
    """
    source = generator(0, "evaluate", SPLITS.index(split))
    return torch.randperm(len(getattr(data, split)), generator=source)


def block_size(replicas: Replicas, group_size: int = 1) -> int:
    """Samples per forward, a whole number of groups."""
    return max(1, STACK_SAMPLES // replicas.num_replicas // group_size) * group_size


def gather(replicas: Replicas, data: Data, split: str, indices: Tensor) -> Batch:
    """The samples at `indices` (N,) of a split as the models take them, without augmentation."""
    batch = getattr(data, split).gather(indices)
    batch["inputs"] = data.model_inputs(batch["inputs"], next(replicas.parameters()).dtype)
    return batch


def run(replicas: Replicas, batch: Batch) -> None:
    """A forward of every replica, for what it does to their buffers."""
    replicas.measure(batch, _nothing, shared=True)


def _nothing(output: Tensor, _: Batch) -> Measured:
    return {"ran": output.new_zeros(())}


@contextmanager
def holding(replicas: Replicas, states: list[State]) -> Iterator[None]:
    """In evaluation mode, with the values of `states`, one for each tree, in their buffers."""
    before = replicas.read_buffers()
    with evaluation_mode(replicas):
        try:
            replicas.write_buffers(states)
            yield
        finally:
            replicas.write_buffers(before)


@contextmanager
def evaluation_mode(replicas: Replicas) -> Iterator[None]:
    """As `eval()`, with every module's mode as before afterwards."""
    modes = {module: module.training for module in replicas.modules()}
    replicas.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def batch_statistics(replicas: Replicas, group_size: int) -> Iterator[None]:
    """Norms use the statistics of groups of `group_size` samples; all else is in evaluation mode.

    A norm's running state moves while inside. Modes, group sizes and buffers are as before
    afterwards, also on an error.
    """
    sites = [site for _, site in named_sites(replicas)]
    sizes = [site.norm_batch_size for site in sites]
    buffers, values = dict(replicas.named_buffers()), read_state(replicas)
    with evaluation_mode(replicas):
        try:
            for site in sites:
                site.train()
                site.norm_batch_size = group_size
            yield
        finally:
            for site, size in zip(sites, sizes, strict=True):
                site.norm_batch_size = size
            install_state(replicas, buffers)  # a foreign norm may have replaced the tensors
            write_state(replicas, values)
