"""Training a stack to its end through Lightning, from its checkpoint where there is one."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy

from normexp.records.files import open_atomic
from normexp.training.module import TrainingTask
from normexp.training.stopping import Interrupted, StopRequest

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


class Replicated(DDPStrategy):
    """One process a device, each with the whole network; the task sums gradients itself.

    Lightning brings the processes together, places devices, and lets the first one write; it does
    not wrap the network, see `batching.processes`.

    Args:
        stop: what answers signals.
    """

    def __init__(self, stop: StopRequest | None, **options: Any) -> None:
        super().__init__(**options)
        self.stop = stop

    def configure_ddp(self) -> None:
        pass

    def barrier(self, name: str | None = None) -> None:
        """Before a stage begins, processes meet here with Lightning's handler just put in place."""
        if self.stop is not None:
            self.stop.keep_listening()
        super().barrier(name)


class Told(LightningEnvironment):
    """Processes that environment variables tell their place, for all trainings of a command."""

    def teardown(self) -> None:
        pass


def device_type(accelerator: str) -> str:
    """`cuda` or `cpu`; what other accelerators there are, Lightning's check knows.

    `auto` is never `mps`, which has no float64 for sums over a data set.
    """
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if accelerator == "gpu" else accelerator


def placed(options: dict[str, Any], stop: StopRequest | None = None) -> dict[str, Any]:
    """The Trainer's options, with what `accelerator: auto` and `strategy: ddp` stand for."""
    options = options | {"accelerator": device_type(options["accelerator"])}
    if options.get("strategy") != "ddp":
        return options
    if options["devices"] * options.get("num_nodes", 1) == 1:
        return options | {"strategy": "auto"}
    # Processes that were told their place by environment variables, as torchrun does, and not by
    # SLURM, which Lightning would find wherever it runs below a SLURM job.
    told = Told() if "RANK" in os.environ else None
    return options | {"strategy": Replicated(stop, cluster_environment=told)}


NOTES = (
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "lightning_fabric.utilities.distributed",
)


def fit(
    task: TrainingTask,
    *,
    checkpoint: Path,
    epochs: int,
    val_every_epochs: int,
    trainer_options: dict[str, Any],
    loggers: list[Logger],
    callbacks: list[pl.Callback],
    stop: StopRequest | None = None,
) -> bool:
    """Trains, validates as it goes, and tests once at the end; `task.final` holds the metrics.

    Args:
        checkpoint: file to resume from where it exists, and to save to.
        trainer_options: accelerator, devices, num_nodes, strategy, precision, for the Trainer.
        stop: where somebody beside Ctrl-C may ask to stop.

    Returns:
        Whether a stop was requested too late to stop this training, which is whole.

    Raises:
        Interrupted: a stop was requested and the checkpoint written.
        KeyboardInterrupt: a second request, which waits for nothing.
    """
    stop = stop or StopRequest()
    with quiet_lightning(), stop.listening():
        trainer = pl.Trainer(
            max_epochs=epochs,
            check_val_every_n_epoch=val_every_epochs,
            num_sanity_val_steps=0,
            logger=loggers or False,
            callbacks=[*callbacks, Checkpointer(checkpoint, stop)],
            enable_checkpointing=False,
            plugins=[WholeCheckpoints()],
            enable_progress_bar=False,
            enable_model_summary=False,
            **placed(trainer_options, stop),
        )
        resume = str(checkpoint) if checkpoint.is_file() else None
        try:
            trainer.fit(task, ckpt_path=resume, weights_only=True)
        except SystemExit:  # what Lightning makes of the KeyboardInterrupt of a second request
            raise KeyboardInterrupt from None
        if task.validated_at != task.step:  # the last epoch had no validation of its own
            trainer.validate(task, verbose=False)
        trainer.test(task, verbose=False)
    return stop.requested


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without Lightning's notes on hardware, loader workers (none here) and its own internals."""
    notes = [logging.getLogger(name) for name in NOTES]
    levels = [each.level for each in notes]
    for each in notes:
        each.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated.*")
            # Every process evaluates in full, so their values are the same already.
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
            yield
    finally:
        for each, level in zip(notes, levels, strict=True):
            each.setLevel(level)
