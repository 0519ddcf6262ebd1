"""Progress of a training: a live bar on a terminal, or reports to a function."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from normexp.training.module import TrainingModule
from normexp.training.recorder import finite_mean

SECONDS_BETWEEN_REPORTS = 0.25
SECONDS_BETWEEN_LINES = 10.0  # without a terminal


class StepReports(pl.Callback):
    """Calls `on_steps(step, total_steps)` a few times a second at most."""

    def __init__(self, on_steps: Callable[[int, int], None]) -> None:
        self.on_steps = on_steps
        self._reported_at = -math.inf

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        del trainer
        assert isinstance(pl_module, TrainingModule)
        if time.monotonic() - self._reported_at > SECONDS_BETWEEN_REPORTS:
            self._reported_at = time.monotonic()
            self.on_steps(pl_module.step, pl_module.recipe.schedule.total_steps)


class TrainingProgress(pl.Callback):
    """Shows epoch, loss and score on stderr: a live bar on a terminal, else occasional lines."""

    def __init__(self, title: str, epochs: int) -> None:
        self.title = title
        self.epochs = epochs
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self._row: Any = None
        self._last_line = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del trainer
        if not sys.stderr.isatty():
            return
        assert isinstance(pl_module, TrainingModule)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        total = pl_module.recipe.schedule.total_steps
        self._row = self.bar.add_task(self._describe(pl_module), total=total)
        self.bar.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        del trainer
        assert isinstance(pl_module, TrainingModule)
        if self.bar is not None:
            description = self._describe(pl_module)
            self.bar.update(self._row, completed=pl_module.step, description=description)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            total = pl_module.recipe.schedule.total_steps
            print(f"{self._describe(pl_module)}  step {pl_module.step}/{total}", file=sys.stderr)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        del trainer, pl_module, stage
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _describe(self, module: TrainingModule) -> str:
        epoch = module.position(module.step).epoch + 1
        parts = [self.title, f"epoch {epoch}/{self.epochs}"]
        loss = finite_mean(module.losses.latest or [])
        if loss is not None:
            parts.append(f"loss {loss:.3f}")
        for name in ("val/accuracy", "val/bits_per_byte"):
            mean = finite_mean(module.metrics.get(name, []))
            if mean is not None:
                parts.append(f"{name} {mean:.3f}")
        return "  ".join(parts)
