"""The training loss of every replica, step by step: its rows, and where it stopped being finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class LossHistory:
    """Collects the losses of optimizer steps on the device and reads them a chunk at a time.

    Args:
        every: optimizer steps between two rows. Rows stand at multiples of it, so that the size of
            chunks leaves no trace.
    """

    def __init__(self, num_replicas: int, every: int) -> None:
        self.every = every
        self.num_steps = 0  # added so far
        self.latest: list[float] | None = None  # the last row
        self.diverged_at: list[int | None] = [None] * num_replicas
        self._pending: list[Tensor] = []  # (S,) each, since the last row

    @property
    def all_diverged(self) -> bool:
        return all(step is not None for step in self.diverged_at)

    def add(self, losses: Tensor) -> None:
        """The losses (S,) of one optimizer step."""
        self._pending.append(losses)
        self.num_steps += 1

    def take_rows(self) -> Iterator[tuple[int, list[float]]]:
        """The rows that are complete: the step each stands at, and the mean loss per replica."""
        first = self.num_steps - len(self._pending)
        if self.num_steps // self.every == first // self.every:
            return
        losses = self._read()  # the one wait for the device
        done, boundary = 0, (first // self.every + 1) * self.every
        while boundary <= self.num_steps:
            part = losses[done : boundary - first]
            self._note_divergence(part, first + done)
            self.latest = part.mean(dim=0).tolist()
            yield boundary, self.latest
            done, boundary = boundary - first, boundary + self.every
        self._pending = self._pending[done:]

    def finish(self) -> None:
        """Looks at the steps after the last row; they have no row of their own."""
        if self._pending:
            self._note_divergence(self._read(), self.num_steps - len(self._pending))
            self._pending = []

    def _read(self) -> Tensor:
        return torch.stack(self._pending).double().cpu()  # (K, S)

    def _note_divergence(self, losses: Tensor, first_step: int) -> None:
        """Remembers for each replica the first step, counted from 1, whose loss was not finite."""
        bad = ~torch.isfinite(losses)  # (K, S)
        for index in bad.any(dim=0).nonzero().flatten().tolist():
            if self.diverged_at[index] is None:
                steps = first_step + int(bad[:, index].float().argmax())
                self.diverged_at[index] = steps + 1

    def state_dict(self) -> dict[str, Any]:
        pending = [losses.cpu() for losses in self._pending]
        return {
            "num_steps": self.num_steps,
            "pending": pending,
            "diverged_at": list(self.diverged_at),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.num_steps = state["num_steps"]
        self._pending = [losses.to(device) for losses in state["pending"]]
        self.diverged_at = list(state["diverged_at"])
