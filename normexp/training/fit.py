"""Runs a training through Lightning: the Trainer, its devices, checkpoints and callbacks.

Lightning calls callbacks at the start and end of training, of each epoch, of each validation and of
the test, and when a checkpoint is written or read. A callback that acts on training batches gets
one optimizer step per batch; `module.step` counts them. `trainer.callback_metrics` has the metrics
of the last validation, as means over the stack.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning import callbacks as shipped
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy

from normexp.errors import UserError
from normexp.training.callbacks import why_stopped
from normexp.training.config.keys import TrainerKeys
from normexp.training.devices import device_type
from normexp.training.module import RunLoggers, TrainingModule
from normexp.training.records.files import open_atomic
from normexp.training.stopping import Interrupted, StopRequest

SECONDS_BETWEEN_SAVES = 60.0
STOP = 2  # a wish for a checkpoint that also ends the training
OUT_OF_MEMORY = (
    "out of memory; stack=false, fewer replicas or a smaller micro_batch_size take less (batch "
    "norm's statistics are then over a micro-batch)"
)
# Parts of the Trainer that are not used: progress and results are our own.
BARE: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit(
    module: TrainingModule,
    *,
    checkpoint: Path,
    callbacks: list[pl.Callback],
    stop: StopRequest | None = None,
) -> None:
    """Trains, validates at intervals, and tests once at the end; fills `module.metrics`.

    Args:
        checkpoint: file to save to, and to resume from if it exists.
        stop: a stop request that other threads can set too.

    Raises:
        UserError: anything but an EarlyStopping ended the training before its last step.
        Interrupted: a stop was requested before the last step, and the checkpoint written.
        MemoryError: with what to change.
        KeyboardInterrupt: a second request, which stops at once.
        SystemExit: of a callback.
    """
    stop = stop or StopRequest()
    settings = module.recipe.settings
    with quiet_lightning(), module.arithmetic, stop.listening():
        trainer = build_trainer(
            settings.trainer,
            checkpoint.parent,
            stop,
            max_epochs=math.ceil(module.recipe.num_steps / module.batches.steps_per_epoch),
            check_val_every_n_epoch=settings.val_every_epochs,
            logger=RunLoggers(module, checkpoint.parent),
            log_every_n_steps=settings.log_every,
            num_sanity_val_steps=0,
            callbacks=[*callbacks, Checkpointer(checkpoint, stop)],
        )
        resume = str(checkpoint) if checkpoint.is_file() else None
        try:
            trainer.fit(module, ckpt_path=resume, weights_only=True)
            all_diverged = None not in module.losses.diverged_at
            if not (module.has_ended or all_diverged or why_stopped(trainer)):
                raise UserError(
                    f"the training ended after {module.step} of {module.recipe.num_steps} steps, "
                    "because of a callback or an option of the trainer; drop it, and set steps or "
                    "epochs to train less, or callback=early_stopping"
                )
            if module.validated_at != module.step:  # the last epoch had no validation
                trainer.validate(module, verbose=False)
            trainer.test(module, verbose=False)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise MemoryError(OUT_OF_MEMORY) from error
            raise
        except SystemExit as error:
            # Lightning's translation of the second request's KeyboardInterrupt
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


def evaluate(module: TrainingModule, folder: Path) -> None:
    """Validates and tests a module without training; fills `module.metrics`.

    Args:
        folder: of the cell.
    """
    keys = module.recipe.settings.trainer
    with quiet_lightning(), module.arithmetic:
        trainer = build_trainer(keys, folder, StopRequest(), enable_checkpointing=False)
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)


for _name in (  # at import, the first thing that processes started by Lightning do
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "lightning_fabric.utilities.distributed",
):
    logging.getLogger(_name).setLevel(logging.WARNING)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silences Lightning's warnings that do not apply here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*`srun` command is available.*")
        warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated.*")
        yield


# --- The Trainer ---------------------------------------------------------------------------------


def build_trainer(keys: TrainerKeys, folder: Path, stop: StopRequest, **options: Any) -> pl.Trainer:
    """Builds a Trainer that depends on its arguments alone.

    Lightning would take what it is not given from PL_TRAINER_* variables, act as a job of the
    cluster whose variables it finds, and in such a job load `hpc_ckpt_*.ckpt` from the current
    folder.

    Args:
        folder: where Lightning looks for such files instead, and callbacks find a place to write.
        options: arguments of the Trainer.
    """
    parameters = inspect.signature(pl.Trainer).parameters
    arguments = {name: parameter.default for name, parameter in parameters.items()}
    arguments |= BARE | options
    arguments |= {
        "default_root_dir": folder,
        "plugins": [AtomicCheckpointIO(), LightningEnvironment()],
        "accelerator": device_type(keys.accelerator),
        "devices": keys.devices,
        "num_nodes": keys.num_nodes,
        "strategy": ReplicatedStrategy(stop) if keys.num_processes > 1 else "auto",
        "precision": keys.precision,
    }
    return pl.Trainer(**arguments)


class ReplicatedStrategy(DDPStrategy):
    """One process per device, each with the whole network; gradients are summed by the module.

    Lightning connects the processes, places devices and lets the first one write. It does not wrap
    the network in DistributedDataParallel, see `batching.processes`.
    """

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self.stop = stop

    def configure_ddp(self) -> None:
        pass

    def barrier(self, name: str | None = None) -> None:
        """Also restores our signal handlers: processes wait here after Lightning set its own."""
        self.stop.keep_listening()
        super().barrier(name)


# --- Checkpoints and stopping --------------------------------------------------------------------


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, so that a kill never leaves half a file.

    Lightning's own way writes to the system's temporary folder, possibly on another disk.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        del storage_options  # for remote file systems
        with open_atomic(Path(path)) as file:
            torch.save(checkpoint, file)


class Checkpointer(shipped.Checkpoint):
    """Saves a checkpoint every SECONDS_BETWEEN_SAVES, and when a stop is requested.

    It does not save after the last chunk of an epoch but only after the validation that follows,
    which a resumed run would otherwise skip. Nor does it save at the end of training: what comes
    after is short, and a resumed run would skip it too.

    It is one of Lightning's checkpoint callbacks because these act last, so it saves the present
    state of EarlyStopping too.
    """

    def __init__(self, path: Path, stop: StopRequest) -> None:
        self.path = path
        self.stop = stop
        self._saved_at = time.monotonic()

    # At the start of each stage Lightning installs its own handler for SIGTERM. With several
    # processes it broadcasts in the middle of a step, where the other processes do not expect it.
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del trainer, pl_module
        self.stop.keep_listening()

    on_validation_start = on_test_start = on_train_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        if pl_module.step % pl_module.batches.steps_per_epoch:
            self._save_if_due(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._save_if_due(trainer, pl_module)

    def _save_if_due(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        if trainer.should_stop or module.has_ended:
            return
        is_due = time.monotonic() - self._saved_at >= SECONDS_BETWEEN_SAVES
        wish = STOP if self.stop.requested else int(is_due)
        if module.processes is not None:  # signals and clocks differ between processes
            wish = module.processes.maximum(wish)
        if wish:
            trainer.save_checkpoint(self.path, weights_only=False)
            self._saved_at = time.monotonic()
        if wish == STOP:
            raise Interrupted


class StepReports(pl.Callback):
    """Calls `on_steps(module)` once a second, and less often if that takes long."""

    def __init__(self, on_steps: Callable[[TrainingModule], None]) -> None:
        self.on_steps = on_steps
        self._due_at = -math.inf

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        del trainer
        assert isinstance(pl_module, TrainingModule)
        if (started := time.monotonic()) >= self._due_at:
            self.on_steps(pl_module)
            now = time.monotonic()
            # At most a minute, since the process may have been suspended meanwhile.
            self._due_at = now + min(max(1.0, 20 * (now - started)), 60.0)
