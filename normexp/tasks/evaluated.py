"""What is measured of a stack of replicas, and how Lightning evaluates it: `val` and `test`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytorch_lightning as pl
import torch
from torch import Tensor

from normexp.batching.replicas import Batch, Measured, Replicas
from normexp.data.dataset import Data
from normexp.tasks.chunks import IndexBlocks
from normexp.tasks.frozen import block_size, shuffled
from normexp.tasks.recorder import Position, Recorder, finite_mean
from normexp.tasks.split_score import SplitScore


class EvaluatedTask(pl.LightningModule, ABC):
    """S replicas on one data set; a subclass says what is measured, and where training stands.

    Args:
        eval_group: samples a norm sees together in evaluation; None where it mixes none.

    Attributes:
        final: the latest metrics, a value per replica.
        validated_at: the step of the last validation.
    """

    def __init__(
        self, replicas: Replicas, data: Data, recorder: Recorder, eval_group: int | None
    ) -> None:
        super().__init__()
        self.replicas = replicas
        self.data = data
        self.recorder = recorder
        self.eval_group = eval_group
        self.final: dict[str, list[float]] = {}
        self.validated_at: int | None = None
        self._scores: dict[str, SplitScore] = {}  # of splits that are being evaluated

    @abstractmethod
    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Summed over the batch's targets."""

    def measure(self, output: Tensor, batch: Batch) -> Measured:
        """What evaluation sums up; training wants the loss alone."""
        return {"loss": self.loss(output, batch)}

    @abstractmethod
    def summarise(self, means: Measured, split: str) -> Measured:
        """Metrics from what `measure` sums up, divided by the number of targets."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Optimizer steps done."""

    @abstractmethod
    def position(self, step: int) -> Position:
        """Where the run stands once `step` optimizer steps are done."""

    def transfer_batch_to_device(
        self, batch: slice, device: torch.device, dataloader_idx: int
    ) -> slice:
        del device, dataloader_idx
        return batch  # places in data that is on the device already

    def val_dataloader(self) -> IndexBlocks:
        return self._blocks("val")

    def test_dataloader(self) -> IndexBlocks:
        return self._blocks("test")

    def _blocks(self, split: str) -> IndexBlocks:
        size = self.eval_group or block_size(self.replicas)
        return IndexBlocks(len(getattr(self.data, split)), size)

    def on_validation_epoch_start(self) -> None:
        self._scores["val"] = SplitScore(self, "val")

    def on_test_epoch_start(self) -> None:
        self._scores["test"] = SplitScore(self, "test")

    def validation_step(self, block: slice) -> None:
        self._scores["val"].add(*self._samples("val", block))

    def test_step(self, block: slice) -> None:
        self._scores["test"].add(*self._samples("test", block))

    def _samples(self, split: str, block: slice) -> tuple[Tensor, int]:
        """A block's samples, and how many of them count.

        Where norms mix samples, blocks are of one size and in random order: the score of a sample
        must depend neither on the order of the split nor on the replicas beside its own.
        """
        if self.eval_group is None:
            return torch.arange(block.start, block.stop), block.stop - block.start
        order = shuffled(self.data, split)
        own = order[block]
        missing = min(self.eval_group, len(order)) - len(own)
        return torch.cat([own, order[:missing]]), len(own)

    def on_validation_epoch_end(self) -> None:
        self._finish("val")
        self.validated_at = self.step

    def on_test_epoch_end(self) -> None:
        self._finish("test")

    def _finish(self, split: str) -> None:
        scores = self._scores.pop(split).metrics()
        metrics = {f"{split}/{name}": column for name, column in scores.items()}
        self.final.update(metrics)
        self.recorder.record(self.position(self.step), metrics)
        for name, column in metrics.items():
            mean = finite_mean(column)
            if mean is not None:
                self.log(name, mean, logger=False)
