"""Training a stack to its end through Lightning, from its checkpoint where there is one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger

from normexp.tasks.checkpoint import Checkpointer, WholeCheckpoints
from normexp.tasks.stopping import StopRequest
from normexp.tasks.strategy import placed
from normexp.tasks.training import TrainingTask

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
