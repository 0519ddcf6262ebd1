"""Records losses and metrics: each run's sinks get its rows, Lightning's loggers the mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pytorch_lightning.loggers import Logger
from torch import Tensor


@dataclass(frozen=True)
class Position:
    """A position in training; `step` counts optimizer steps done."""

    step: int
    epoch: int
    samples_seen: int


class RunSink(Protocol):
    """Takes the rows of one run, like `records.MetricsWriter`."""

    def add(
        self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]
    ) -> None: ...
    def flush(self) -> None: ...
    def truncate_after(self, step: int) -> None: ...


class Recorder:
    """Passes each run's values to its sinks, and the mean over the stack to Lightning's loggers.

    Args:
        sinks: of each replica's run; they get what is recorded.
        trackers: of each replica's run; they also get what is only `track`ed.
        loggers: Lightning loggers of the whole stack; they too get everything.
    """

    def __init__(
        self,
        sinks: Sequence[Sequence[RunSink]],
        loggers: Sequence[Logger] = (),
        trackers: Sequence[Sequence[RunSink]] | None = None,
    ) -> None:
        self.trackers = trackers or [[] for _ in sinks]
        self.sinks = [[*own, *more] for own, more in zip(sinks, self.trackers, strict=True)]
        self.loggers = loggers

    @property
    def tracks(self) -> bool:
        """True if anything looks at what is only tracked."""
        return bool(self.loggers) or any(self.trackers)

    def record(self, position: Position, values: dict[str, list[float]]) -> None:
        """Records a number per replica by metric; leaves out what is not finite."""
        self._pass_on(self.sinks, position, values)

    def track(self, position: Position, values: dict[str, list[float]]) -> None:
        """Like `record`, but not in metrics.csv, which holds what a repetition would reproduce."""
        self._pass_on(self.trackers, position, values)

    def _pass_on(
        self,
        sinks: Sequence[Sequence[RunSink]],
        position: Position,
        values: dict[str, list[float]],
    ) -> None:
        for index, run_sinks in enumerate(sinks):
            row = {name: column[index] for name, column in values.items()}
            finite = {name: value for name, value in row.items() if math.isfinite(value)}
            for sink in run_sinks:
                sink.add(position.step, position.epoch, position.samples_seen, finite)
        means = {name: finite_mean(column) for name, column in values.items()}
        present = {name: mean for name, mean in means.items() if mean is not None}
        for logger in self.loggers:
            logger.log_metrics(present, step=position.step)

    def flush(self) -> None:
        """Writes everything recorded so far to disk; called before a checkpoint."""
        for sink in (sink for run_sinks in self.sinks for sink in run_sinks):
            sink.flush()

    def truncate_after(self, step: int) -> None:
        """Removes the rows after `step`, from which training resumes."""
        for sink in (sink for run_sinks in self.sinks for sink in run_sinks):
            sink.truncate_after(step)


def finite_mean(column: Sequence[float]) -> float | None:
    """Returns the mean of the finite values; None if there are none."""
    finite = [value for value in column if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


class LossHistory:
    """Collects the losses of optimizer steps on the device and averages them into rows.

    Args:
        every: optimizer steps per row. Rows end at multiples of it, independent of chunks.

    Attributes:
        num_steps: optimizer steps added so far.
        latest: the last row; None before the first.
        diverged_at: for each replica, the first step (from 1) with a loss that is not finite.
    """

    def __init__(self, num_replicas: int, every: int) -> None:
        self.every = every
        self.num_steps = 0
        self.latest: list[float] | None = None
        self.diverged_at: list[int | None] = [None] * num_replicas
        self._pending: list[Tensor] = []  # (S,) each, since the last row

    @property
    def all_diverged(self) -> bool:
        return all(step is not None for step in self.diverged_at)

    def look_for_divergence(self) -> bool:
        """Waits for the device, and returns True if all replicas have diverged."""
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
        boundaries = range((first // self.every + 1) * self.every, self.num_steps + 1, self.every)
        begin = first
        for end in boundaries:
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
