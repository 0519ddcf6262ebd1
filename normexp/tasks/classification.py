"""Naming the class of a sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from normexp.batching.replicas import Batch, Measured
from normexp.tasks.training import TrainingTask


class Classification(TrainingTask):
    """Cross-entropy in nats over classes, and accuracy as a share of samples."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        # output (N, num_classes), targets (N,)
        return functional.cross_entropy(output, batch["targets"], reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measured:
        correct = (output.argmax(dim=-1) == batch["targets"]).sum()
        return {"loss": self.loss(output, batch), "correct": correct}

    def summarise(self, means: Measured, split: str) -> Measured:  # noqa: ARG002
        loss, correct = means["loss"], means["correct"]
        accuracy = torch.where(loss.isfinite(), correct, torch.nan)  # NaN logits point at class 0
        return {"loss": loss, "accuracy": accuracy}
