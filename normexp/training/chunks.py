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

    A chunk ends with the epoch and with the last step at the latest. Within
    these bounds its size doubles from one step until a chunk takes `target_seconds`: small steps
    then pay little for Lightning's loop, and large ones still show progress and can be interrupted.
    The size of chunks does not change any result. (Slices, because Lightning unpacks a range into
    its items.)

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
        self._pending: list[Tensor] = []  # (S,) each, since the last row

    @property
    def all_diverged(self) -> bool:
        return None not in self.diverged_at

    def check_divergence(self) -> bool:
        """True if all replicas have diverged; waits for the device."""
        self._read(len(self._pending))
        return self.all_diverged

    def add(self, losses: Tensor) -> None:
        """Adds the losses (S,) of one optimizer step; does not wait for the device."""
        self._pending.append(losses)
        self.num_steps += 1

    def take_rows(self) -> Iterator[tuple[int, list[float]]]:
        """Yields each complete row once: its last step, and the mean loss of each replica."""
        first = self.num_steps - len(self._pending)  # steps before the pending ones
        num_whole = self.num_steps // self.every * self.every - first
        if num_whole <= 0:
            return
        losses = self._read(num_whole)
        del self._pending[:num_whole]
        begin = first
        for end in range((first // self.every + 1) * self.every, self.num_steps + 1, self.every):
            self.latest = losses[begin - first : end - first].mean(dim=0).tolist()
            yield end, self.latest
            begin = end

    def finish(self) -> None:
        """Checks the steps after the last row for divergence; they get no row of their own."""
        self._read(len(self._pending))
        self._pending = []

    def _read(self, num_steps: int) -> Tensor:
        """Returns the first pending losses, float64 (num_steps, S); notes where they diverged."""
        first = self.num_steps - len(self._pending)
        if num_steps == 0:
            return torch.empty(0)
        losses = torch.stack(self._pending[:num_steps]).double().cpu()
        bad = ~torch.isfinite(losses)
        for index in bad.any(dim=0).nonzero().flatten().tolist():
            if self.diverged_at[index] is None:
                self.diverged_at[index] = first + int(bad[:, index].float().argmax()) + 1
        return losses

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "pending": [losses.cpu() for losses in self._pending],
            "diverged_at": list(self.diverged_at),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.num_steps = state["num_steps"]
        self._pending = [losses.to(device) for losses in state["pending"]]
        self.diverged_at = list(state["diverged_at"])
