"""Randomness without state: every draw is a function of (seed, stream, index).

A resumed run needs no generator in its checkpoint, a run's draws do not depend on its neighbours in
a stack, and one seed means the same draws for every norm, so norms can be compared in pairs.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from torch import Tensor, nn

Stream = Literal["init", "order", "augment", "dropout", "foreign", "split", "evaluate"]

_LOW_32 = 0xFFFFFFFF


def derive_seed(seed: int, stream: Stream, index: int = 0) -> int:
    """A 63-bit seed for one draw, well mixed, so that neighbouring seeds share nothing."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, stream: Stream, index: int = 0) -> torch.Generator:
    """A CPU generator for one draw: devices differ in their generators, the draws must not."""
    return torch.Generator().manual_seed(derive_seed(seed, stream, index))


def _mix(x: Tensor) -> Tensor:
    """Hash of 32-bit integers held in int64 (Wellons' lowbias32), as plain tensor arithmetic."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW_32
    return x ^ (x >> 16)


class Dropout(nn.Module):
    """Dropout whose noise is computed from a key, so that it may run under vmap and in parts.

    y = x * keep / (1 - p), with keep a hash of (key, sample, element). The training step writes
    `key` and `first_sample` (where this part of the batch begins in the step's batch), so the noise
    of a sample does not depend on how the batch is split. Shape (N, *) in and out.
    """

    key: Tensor
    first_sample: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout={p} is no probability below 1; try dropout=0.1")
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
