"""What is faster on this device: replicas stacked or in turn, one CPU thread or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# With up to this many normalized elements in one replica's forward pass, a CPU gains from stacking
# and loses from a second thread; with more, the opposite. Measured on two cores (shipped convnet,
# 8 replicas, one thread): stacking is 1.4x faster at half the limit, 1.0x at it, 0.8x at twice.
SMALL_FORWARD = 2**17


def stacking_pays(device_type: str, num_replicas: int, elements_per_forward: int) -> bool:
    """Returns True if stacking replicas is faster than running them one after another.

    Args:
        device_type: "cpu", "cuda" and so on.
        elements_per_forward: values entering all sites of one replica in one forward pass.
    """
    if num_replicas == 1:
        return False
    return device_type != "cpu" or elements_per_forward <= SMALL_FORWARD


@contextmanager
def suitable_threads(elements_per_forward: int, threads: int | None = None) -> Iterator[None]:
    """Limits torch to one CPU thread inside the block if the network is too small for several.

    Args:
        threads: of a larger network; None: those of torch.
    """
    before = torch.get_num_threads()
    if elements_per_forward <= SMALL_FORWARD:
        torch.set_num_threads(1)
    elif threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
