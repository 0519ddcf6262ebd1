"""The three batch sizes: samples per optimizer step, per forward pass and per statistic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normexp.errors import UserError
from normexp.verdicts.settings import SIZES

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """The samples of device `index` of `count`: an equal contiguous part of each forward."""

    index: int = 0
    count: int = 1


WHOLE = Share()


@dataclass(frozen=True)
class Sizes:
    """Samples of one replica per optimizer step, per forward pass, and per set of statistics.

    `micro_batch_size` None means `batch_size`; `norm_batch_size` None means `micro_batch_size`.
    """

    batch_size: int
    micro_batch_size: int | None = None
    norm_batch_size: int | None = None

    def __post_init__(self) -> None:
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

    def effective(self, *, mixes_samples: bool = True) -> dict[str, int]:
        """The sizes as numbers; without mixing, statistics are of all samples of a forward."""
        norm = self.norm if mixes_samples else self.micro
        return dict(zip(SIZES, (self.batch_size, self.micro, norm), strict=True))

    def canonical(self, *, mixes_samples: bool) -> dict[str, int | None]:
        """The sizes as ids count them: None where one is equal to the next larger one.

        `norm_batch_size` is also None for a norm that does not mix samples.
        """
        has_norm_size = mixes_samples and self.norm < self.micro
        return {
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro if self.micro < self.batch_size else None,
            "norm_batch_size": self.norm if has_norm_size else None,
        }

    def shared_by(self, count: int, *, synchronized: bool = False) -> Sizes:
        """Returns the sizes with which one process trains exactly like `count` devices.

        A device sees micro / count samples of a forward, so at most that many share statistics.
        With a `synchronized` norm all samples of a forward do.

        Raises:
            UserError: a forward cannot be shared evenly.
        """
        if count == 1:
            return self
        if self.micro % count:
            key = "batch_size" if self.micro_batch_size is None else "micro_batch_size"
            fewer = next(less for less in range(count, 0, -1) if self.micro % less == 0)
            raise UserError(
                f"{key}={self.micro} cannot be shared evenly by {count} devices; try {fewer}"
            )
        norm = None if synchronized else min(self.norm, self.micro // count)
        return Sizes(self.batch_size, self.micro_batch_size, norm)

    def micro_bounds(self, num_samples: int, share: Share = WHOLE) -> list[Bounds]:
        """Returns the bounds [first, last) of each forward pass over a batch.

        With a `share`, only that device's part of each forward. In a short batch the last forward
        may be shorter, and some devices may have no part in it.
        """
        width = self.micro // share.count
        firsts = range(share.index * width, num_samples, self.micro)
        return [(first, min(first + width, num_samples)) for first in firsts]


def _check_divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        divisors = [size for size in range(1, large + 1) if large % size == 0]
        divisors.sort(key=lambda size: abs(math.log(size / small)))
        nearest = divisors[:2]
        remedy = " or ".join(f"{small_key}={size}" for size in sorted(nearest))
        raise UserError(f"{small_key}={small} does not divide {large_key}={large}; try {remedy}")
