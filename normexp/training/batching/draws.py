"""Randomness without state: every draw is a function of (seed, stream, index).

So checkpoints need no generator state, and the draws of a run do not depend on its neighbours in a
stack. A seed means the same draws for every norm, so norms can be compared in pairs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

Stream = Literal[
    "init",
    "order",
    "augment",
    "dropout",
    "foreign",
    "split",
    "limit",
    "evaluate",
    "moons",
    "shapes",
]

_LOW_32 = 0xFFFFFFFF


def derive_seed(seed: int, stream: Stream, index: int = 0) -> int:
    """Returns a 63-bit seed for one draw, hashed so that neighbouring seeds are independent."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, stream: Stream, index: int = 0) -> torch.Generator:
    """Returns a CPU generator for one draw, so that draws are the same on every device."""
    return torch.Generator().manual_seed(derive_seed(seed, stream, index))


@contextmanager
def keeping_random_state(network: nn.Module) -> Iterator[None]:
    """Restores the random states of torch, NumPy and Python at the end, also after an error."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [*{p.device for p in network.parameters() if p.is_cuda}]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _mix(x: Tensor) -> Tensor:
    """Hashes 32-bit integers held in int64 (Wellons' lowbias32) with plain tensor arithmetic."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)


class Dropout(nn.Module):
    """Dropout with noise computed from a key: runs under vmap, and on parts of a batch.

    y = x * keep / (1 - p), where keep is a hash of (key, sample, element). The training step sets
    `key` and `first_sample`, the index of the first sample of x within the step's batch, so that
    the noise of a sample does not depend on how the batch is split. Shape (N, *) in and out.
    """

    key: Tensor
    first_sample: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout={p} must be at least 0 and below 1; try dropout=0.1")
        self.p = p
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("first_sample", torch.zeros((), dtype=torch.int64), persistent=False)

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        per_sample = x[0].numel()
        index = torch.arange(x.numel(), device=x.device) + self.first_sample * per_sample
        noise = _mix(_mix(index & _LOW_32) ^ (self.key & _LOW_32)).view(x.shape)
        keep = noise >= int(self.p * 2**32)
        return x * keep / (1 - self.p)
