"""Counters of norms, which all norms of a step move in one operation.

On a GPU a launch for each counter would take longer than many a norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# What the current block adds at its end, by norm and name of the buffer; None: at once.
_pending: Counter[tuple[nn.Module, str]] | None = None


def add_to_counters(norm: nn.Module, **amounts: int) -> None:
    """Adds each amount to the integer buffer of its name, now or at the end of a `counting`."""
    for name, amount in amounts.items():
        if _pending is None:
            norm.get_buffer(name).add_(amount)
        else:
            _pending[norm, name] += amount


@contextmanager
def counting(*, at_end: bool) -> Iterator[None]:
    """Norms inside the block move their counters `at_end` of it, or each in its own forward.

    Enter and leave the block outside of vmap. With `at_end`, a norm that runs twice inside reads
    the count from before the block both times.
    """
    global _pending
    outer = _pending
    _pending = amounts = Counter() if at_end else None
    try:
        yield
    finally:
        _pending = outer
    if amounts:
        counters = [norm.get_buffer(name) for norm, name in amounts]
        torch._foreach_add_(counters, [*amounts.values()])  # type: ignore[attr-defined]
