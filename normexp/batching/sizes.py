"""The three batch sizes: what an optimizer step, a forward pass and a statistic see."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normexp.errors import UserError

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """Samples of one replica per optimizer step, per forward pass, and per set of statistics.

    `micro_batch_size` None means `batch_size`; `norm_batch_size` None means `micro_batch_size`.
    """

    batch_size: int
    micro_batch_size: int | None = None
    norm_batch_size: int | None = None

    def __post_init__(self) -> None:
        for key in ("batch_size", "micro_batch_size", "norm_batch_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"{key}={value} is not positive; try {key}=1 or more")
        _check_divides("micro_batch_size", self.micro, "batch_size", self.batch_size)
        above = "batch_size" if self.micro_batch_size is None else "micro_batch_size"
        _check_divides("norm_batch_size", self.norm, above, self.micro)

    @property
    def micro(self) -> int:
        """Samples per forward pass."""
        return self.micro_batch_size or self.batch_size

    @property
    def norm(self) -> int:
        """Samples per set of batch statistics."""
        return self.norm_batch_size or self.micro

    @property
    def label(self) -> str:
        """The literature's name for this split: full, accumulated, ghost, or both of the latter."""
        accumulated, ghost = self.micro < self.batch_size, self.norm < self.micro
        if accumulated and ghost:
            return "accumulated ghost"
        return "accumulated" if accumulated else "ghost" if ghost else "full"

    def micro_bounds(self, num_samples: int) -> list[Bounds]:
        """First and last index of each forward pass over a batch; the last one may be short."""
        return [
            (first, min(first + self.micro, num_samples))
            for first in range(0, num_samples, self.micro)
        ]


def _check_divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        divisors = [size for size in range(1, large + 1) if large % size == 0]
        nearest = sorted(divisors, key=lambda size: abs(math.log(size / small)))[:2]
        remedy = " or ".join(f"{small_key}={size}" for size in sorted(nearest))
        raise UserError(f"{small_key}={small} does not divide {large_key}={large}; try {remedy}")
