"""Ends a training early whose validation is below what others had at the same epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl

from normexp.training.module import TrainingModule


class Pruned(Exception):
    """A training was ended early; its metrics.csv says how far it came."""


class Pruner(pl.Callback):
    """The median rule: ends a stack whose best mean so far is worse than the threshold.

    Args:
        metric: name of a validation metric; its mean over the stack is what counts.
        thresholds: epoch to the median of earlier trials; an epoch without one ends nothing.
        higher_is_better: of the metric. A value that is not finite is the worst.
    """

    def __init__(
        self, metric: str, thresholds: Mapping[int, float], *, higher_is_better: bool
    ) -> None:
        self.metric = metric
        self.thresholds = thresholds
        self.sign = 1.0 if higher_is_better else -1.0
        self.worst = 0.0 if higher_is_better else -math.inf  # times the sign, as `best`
        self.best = self.worst

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del trainer
        assert isinstance(pl_module, TrainingModule)
        if pl_module.validated_at != pl_module.step:
            return
        known = [self.sign * v for v in pl_module.metrics[self.metric]]
        finite = [v if math.isfinite(v) else self.worst for v in known]
        self.best = max(self.best, sum(finite) / len(finite))
        epoch = pl_module.position(pl_module.step).epoch
        threshold = self.thresholds.get(epoch)
        if threshold is not None and self.best < self.sign * threshold:
            pl_module.recorder.flush()
            raise Pruned(f"epoch {epoch + 1}: {self.metric} is below the median of earlier trials")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
