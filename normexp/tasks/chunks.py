"""What Lightning's loops iterate over: places in the data, never the data itself.

A place is a builtin slice, which Lightning hands through as it is; it would open a range.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


class ChunkLoader:
    """The chunks of one epoch, from wherever training stands: slices of optimizer steps.

    Chunks end with the epoch and with the last step. Within these bounds their size follows the
    clock: they double from one step until a chunk takes `target_seconds`, so that a small step
    pays little for Lightning's loop and a large one still shows progress and can be interrupted.
    The size of a chunk changes no result.

    Args:
        current_step: optimizer steps done so far.
        max_steps: the most steps in a chunk.
        agree: of processes that train together, the first one's number; None for one alone.
    """

    target_seconds = 0.25

    def __init__(
        self,
        current_step: Callable[[], int],
        steps_per_epoch: int,
        total_steps: int,
        max_steps: int,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        self.current_step = current_step
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = total_steps
        self.max_steps = max_steps
        self.agree = agree or (lambda number: number)
        self._size = 1

    def __iter__(self) -> Iterator[slice]:
        step = self.current_step()
        epoch_end = (step // self.steps_per_epoch + 1) * self.steps_per_epoch
        end = min(epoch_end, self.total_steps)
        while step < end:
            num_steps = self.agree(min(self._size, end - step))
            started = time.perf_counter()
            yield slice(step, step + num_steps)
            self._resize(time.perf_counter() - started, num_steps)
            step += num_steps

    def _resize(self, seconds: float, num_steps: int) -> None:
        affordable = int(self.target_seconds / max(seconds / num_steps, 1e-9))
        self._size = max(1, min(2 * self._size, affordable, self.max_steps))


class IndexBlocks:
    """The indices of a split as consecutive slices, for evaluation."""

    def __init__(self, num_samples: int, block_size: int) -> None:
        self.num_samples = num_samples
        self.block_size = block_size

    def __len__(self) -> int:
        return -(-self.num_samples // self.block_size)

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.num_samples, self.block_size):
            yield slice(first, min(first + self.block_size, self.num_samples))
