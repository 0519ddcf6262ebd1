"""Chunks: how many optimizer steps go into one call of `training_step`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from normexp.batching.processes import Processes


class ChunkLoader:
    """Yields the chunks of an epoch as slices of optimizer steps, from the current step on.

    A chunk ends with the epoch and with the last step at the latest. Within these bounds its size
    doubles from one step until a chunk takes `target_seconds`: small steps then pay little for
    Lightning's loop, and large ones still show progress and can be interrupted. The size of chunks
    does not change any result. (Slices, because Lightning unpacks a range into its items.)

    Args:
        current_step: returns the number of optimizer steps done so far.
        max_steps: most steps in a chunk.
        processes: all of them use the largest of their chunk sizes.
    """

    target_seconds = 0.25

    def __init__(
        self,
        current_step: Callable[[], int],
        steps_per_epoch: int,
        total_steps: int,
        max_steps: int,
        processes: Processes | None = None,
    ) -> None:
        self.current_step = current_step
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = total_steps
        self.max_steps = max_steps
        self.processes = processes
        self._size = 1

    def __iter__(self) -> Iterator[slice]:
        step = self.current_step()
        epoch_end = (step // self.steps_per_epoch + 1) * self.steps_per_epoch
        end = min(epoch_end, self.total_steps)
        while step < end:
            num_steps = min(self._size, end - step)
            if self.processes is not None:
                num_steps = self.processes.highest(num_steps)
            started = time.perf_counter()
            yield slice(step, step + num_steps)
            self._resize(time.perf_counter() - started, num_steps)
            step += num_steps

    def _resize(self, seconds: float, num_steps: int) -> None:
        affordable = int(self.target_seconds / max(seconds / num_steps, 1e-9))
        self._size = max(1, min(2 * self._size, affordable, self.max_steps))
