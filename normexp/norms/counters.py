"""Counters of norms, which all norms of a network move in one operation.

On a GPU a launch for each counter would take longer than many a norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Counting(nn.Module):
    """A norm with counters.

    Attributes:
        counters: those that the norms of a network move together; None: each moves its own.
    """

    counters: Counters | None = None

    def count(self, **amounts: int) -> None:
        """Adds each amount to the integer buffer of its name, now or when the others move."""
        together = self.counters.amounts if self.counters else None
        for name, amount in amounts.items():
            if together is None:
                getattr(self, name).add_(amount)
            else:
                together[self, name] += amount


class Counters:
    """The counters of some norms.

    Attributes:
        amounts: what the current block adds at its end, by norm and name of the buffer; None: each
            norm moves its own in its forward.
    """

    def __init__(self, norms: Sequence[Counting]) -> None:
        self.amounts: Counter[tuple[nn.Module, str]] | None = None
        for norm in norms:
            norm.counters = self

    @contextmanager
    def moving_at_end(self) -> Iterator[None]:
        """The norms move their counters at the end of the block.

        Enter and leave the block outside of vmap. A norm that runs twice inside reads the count
        from before the block both times.
        """
        self.amounts = amounts = Counter()
        try:
            yield
        finally:
            self.amounts = None
        if amounts:
            counters = [getattr(norm, name) for norm, name in amounts]
            torch._foreach_add_(counters, [*amounts.values()])  # type: ignore[attr-defined]

    @contextmanager
    def moving_at_once(self) -> Iterator[None]:
        """Inside such a block, the norms move their counters in their own forwards again."""
        outer, self.amounts = self.amounts, None
        try:
            yield
        finally:
            self.amounts = outer


def norms_with_counters(module: nn.Module) -> list[Counting]:
    """The norms with counters in a module, itself included."""
    return [norm for norm in module.modules() if isinstance(norm, Counting)]
