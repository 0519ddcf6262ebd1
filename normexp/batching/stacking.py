"""How replicas use the processor: fixed rules, so that a resumed run takes the same path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Up to this many normalized elements in one replica's forward pass, a CPU gains from stacking and
# loses from a second thread; beyond it, the other way round. On two cores with the shipped convnet
# and 8 replicas, one thread: stacked against in turn 1.4x at half of it, 1.0x at it, 0.8x at twice.
SMALL_FORWARD = 2**17


def stacks(device_type: str, num_replicas: int, elements_per_forward: int) -> bool:
    """Whether to stack replicas rather than run one after another.

    Args:
        device_type: "cpu", "cuda" and so on.
        elements_per_forward: values that reach all sites of one replica in one forward pass.
    """
    if num_replicas == 1:
        return False
    return device_type != "cpu" or elements_per_forward <= SMALL_FORWARD


@contextmanager
def suitable_threads(elements_per_forward: int) -> Iterator[None]:
    """One CPU thread while inside for a network too small to share; else what torch was given."""
    before = torch.get_num_threads()
    if elements_per_forward <= SMALL_FORWARD:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
