"""Chunks, the optimizer steps of one call of `training_step`, and the history of their losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

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
        processes: those that share each step; all use the largest of their chunk sizes.
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
                num_steps = self.processes.maximum(num_steps)
            started = time.perf_counter()
            yield slice(step, step + num_steps)
            seconds = (time.perf_counter() - started) / num_steps
            affordable = int(self.target_seconds / max(seconds, 1e-9))
            self._size = max(1, min(2 * self._size, affordable, self.max_steps))
            step += num_steps


class LossHistory:
    """Collects the losses of optimizer steps on the device and averages them into rows.

    Args:
        every: optimizer steps per row. Rows end at multiples of it, independent of chunks.

    Attributes:
        num_steps: optimizer steps added so far.
        latest: the last row; empty before the first.
        diverged_at: for each replica, the first step (from 1) with a loss that is not finite.
    """

    def __init__(self, num_replicas: int, every: int) -> None:
        self.every = every
        self.num_steps = 0
        self.latest: list[float] = []
        self.diverged_at: list[int | None] = [None] * num_replicas
        self._unread: list[Tensor] = []  # (S,) each, on the device
        self._row: list[Tensor] = []  # float64 (S,) each, on the CPU, since the last row

    @property
    def all_diverged(self) -> bool:
        return None not in self.diverged_at

    def add(self, losses: Tensor) -> None:
        """Adds the losses (S,) of one optimizer step; does not wait for the device."""
        self._unread.append(losses)
        self.num_steps += 1

    def read(self) -> Iterator[tuple[int, list[float]]]:
        """Reads what was added; yields each complete row: its last step, each replica's mean."""
        if not self._unread:
            return
        first = self.num_steps - len(self._unread) + 1
        losses, self._unread = torch.stack(self._unread).double().cpu(), []
        for index, bad in enumerate((~losses.isfinite()).T):
            if self.diverged_at[index] is None and bad.any():
                self.diverged_at[index] = first + int(bad.float().argmax())
        for step, of_step in enumerate(losses, start=first):
            self._row.append(of_step)
            if step % self.every == 0:
                self.latest = torch.stack(self._row).mean(dim=0).tolist()
                self._row = []
                yield step, self.latest

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes; everything must have been read."""
        return {"num_steps": self.num_steps, "row": self._row, "diverged_at": self.diverged_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]
        self._row = list(state["row"])
        self.diverged_at = list(state["diverged_at"])
