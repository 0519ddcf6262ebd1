"""Which samples a step sees: a function of (seed, epoch), so that a resumed run needs no state."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.batching.draws import generator


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """A permutation of the samples, int64 (num_samples,) on the CPU."""
    return torch.randperm(num_samples, generator=generator(seed, "order", epoch))


def window_offset(seed: int, epoch: int, block_size: int) -> int:
    """Where the windows of an epoch begin, in [0, block_size): other cuts of the text each time."""
    return int(torch.randint(block_size, (), generator=generator(seed, "order", epoch)))
