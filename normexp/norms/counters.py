"""Counters of norms: those of all norms in a step move together.

A launch for each counter would take a GPU longer than many a norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_waiting: Counter[tuple[nn.Module, str]] | None = None  # what is still to be added to a counter


def add_to_counters(norm: nn.Module, **numbers: int) -> None:
    """Adds each number to the integer buffer of its name, or leaves that to `counting`."""
    for name, number in numbers.items():
        if _waiting is None:
            norm.get_buffer(name).add_(number)
        else:
            _waiting[norm, name] += number


@contextmanager
def counting(*, together: bool) -> Iterator[None]:
    """Norms inside the block count at its end, `together`, or each in its forward.

    Enter and leave the block outside of vmap. A norm that runs twice in it reads, both times, the
    count from before.
    """
    global _waiting
    outer = _waiting
    _waiting = waiting = Counter() if together else None
    try:
        yield
    finally:
        _waiting = outer
    if waiting:
        counters = [norm.get_buffer(name) for norm, name in waiting]
        torch._foreach_add_(counters, [*waiting.values()])  # type: ignore[attr-defined]
