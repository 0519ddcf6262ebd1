"""Checkpoints at the ends of chunks, from time to time and where a stop was requested."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from normexp.records.writer import open_atomic
from normexp.tasks.stopping import Interrupted, StopRequest
from normexp.tasks.training import TrainingTask

NONE, DUE, STOP = range(3)  # reasons for a checkpoint


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are there whole or not at all, whenever the process is killed.

    Lightning's own go through the folder of temporary files, which may be another disk.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        assert storage_options is None, "for checkpoints in the cloud, which are not written here"
        with open_atomic(Path(path)) as file:
            torch.save(checkpoint, file)


class Checkpointer(pl.Callback):
    """Saves the stack every `interval` seconds, and once more where a stop was requested.

    Never after the last chunk of an epoch: validation comes next, and a run that resumed between
    the two would skip it. There the checkpoint follows validation. Nor once training is over: a run
    that resumed there would skip what ends a training, which is short.
    """

    def __init__(self, path: Path, stop: StopRequest, interval: float = 60.0) -> None:
        self.path = path
        self.stop = stop
        self.interval = interval
        self._saved_at = time.monotonic()

    # As a stage begins, Lightning puts a handler of its own before ours. Of several processes it
    # answers SIGTERM with a broadcast at whatever step each is, and their exchanges no longer meet.
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del trainer, pl_module
        self.stop.keep_listening()

    on_validation_start = on_test_start = on_train_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        assert isinstance(pl_module, TrainingTask)
        if pl_module.step % pl_module.batches.steps_per_epoch:
            self._save_if_due(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingTask)
        self._save_if_due(trainer, pl_module)

    def _save_if_due(self, trainer: pl.Trainer, task: TrainingTask) -> None:
        if trainer.should_stop or task.step >= task.recipe.schedule.total_steps:
            return
        due = time.monotonic() - self._saved_at >= self.interval
        reason = STOP if self.stop.requested else DUE if due else NONE
        if task.processes is not None:  # signals and clocks differ; all save, or none
            reason = task.processes.highest(reason)
        if reason == NONE:
            return
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_at = time.monotonic()
        if reason == STOP:
            raise Interrupted
