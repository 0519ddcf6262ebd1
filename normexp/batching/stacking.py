"""Whether replicas run stacked or one after another: a fixed rule, so that a resumed run agrees."""

from __future__ import annotations

# Above this many normalized elements per forward pass of one replica, a CPU's cores are busy with
# a single network and vmap's grouped kernels lose; scripts/bench.py measures the crossing.
CPU_ELEMENTS = 2**17


def stacks(device_type: str, num_replicas: int, elements_per_forward: int) -> bool:
    """Whether to stack.

    Args:
        device_type: "cpu", "cuda" and so on.
        elements_per_forward: values that reach all sites of one replica in one forward pass.
    """
    if num_replicas == 1:
        return False
    return device_type != "cpu" or elements_per_forward <= CPU_ELEMENTS
