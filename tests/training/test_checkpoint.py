"""A stop is heard by the request alone, whatever Lightning sets up for itself."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from normexp.training.fit import Checkpointer
from normexp.training.stopping import StopRequest


class Tiny(pl.LightningModule):
    """Notes who answers SIGTERM in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.heard: dict[str, Any] = {}

    def training_step(self, _batch: Any) -> None:
        self.heard["train"] = signal.getsignal(signal.SIGTERM)

    def validation_step(self, _batch: Any) -> None:
        self.heard["validate"] = signal.getsignal(signal.SIGTERM)

    def test_step(self, _batch: Any) -> None:
        self.heard["test"] = signal.getsignal(signal.SIGTERM)

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore")
def test_no_stage_leaves_a_stop_to_lightning_which_would_broadcast_it(tmp_path: Path):
    class Silent(Checkpointer):
        def _save_if_due(self, *_: Any) -> None:
            pass

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            pass

        def on_train_epoch_end(self, *_: Any) -> None:
            pass

    stop, task, data = StopRequest(), Tiny(), DataLoader(TensorDataset(torch.zeros(1, 1)))
    with stop.listening():
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[Silent(tmp_path / "last.ckpt", stop)],
        )
        trainer.fit(task, data)
        trainer.validate(task, data, verbose=False)
        trainer.test(task, data, verbose=False)
        assert task.heard == dict.fromkeys(("train", "validate", "test"), stop._request)
