"""What a model learns to minimise, and the metrics that evaluation reports."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from normexp.batching.replicas import Batch, Measured
from normexp.data.dataset import Data


class Criterion(ABC):
    """The loss of one replica's output, and metrics from sums over a split."""

    @abstractmethod
    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the loss summed over the batch's targets."""

    def measure(self, output: Tensor, batch: Batch) -> Measured:
        """Returns what evaluation adds up over a split."""
        return {"loss": self.loss(output, batch)}

    @abstractmethod
    def each_sample(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns what samples.npz keeps of each sample (N,)."""

    @abstractmethod
    def summarise(self, means: Measured, split: str) -> Measured:
        """Returns metrics from what `measure` returned, summed and divided by the targets."""


class Classification(Criterion):
    """Cross-entropy in nats, and accuracy as the share of samples classified correctly."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        # output (N, num_classes), targets (N,)
        return functional.cross_entropy(output, batch["targets"], reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measured:
        return {
            "loss": self.loss(output, batch),
            "correct": self.each_sample(output, batch).sum(),
        }

    def each_sample(self, output: Tensor, batch: Batch) -> Tensor:
        """Right or not, bool."""
        return output.argmax(dim=-1) == batch["targets"]

    def summarise(self, means: Measured, split: str) -> Measured:  # noqa: ARG002
        loss, correct = means["loss"], means["correct"]
        accuracy = torch.where(loss.isfinite(), correct, torch.nan)  # argmax of NaN is class 0
        return {"loss": loss, "accuracy": accuracy}


class LanguageModeling(Criterion):
    """Cross-entropy in nats per token, and in bits per byte of UTF-8 text.

    Args:
        bytes_per_token: of each split.
    """

    def __init__(self, bytes_per_token: Mapping[str, float]) -> None:
        self.bytes_per_token = bytes_per_token

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()  # (N*T, V), (N*T,)
        return functional.cross_entropy(logits, targets, reduction="sum")

    def each_sample(self, output: Tensor, batch: Batch) -> Tensor:
        """Mean loss per token of each sequence, in nats."""
        losses = functional.cross_entropy(
            output.movedim(2, 1), batch["targets"], reduction="none"
        )  # (N, T)
        return losses.mean(dim=1)

    def summarise(self, means: Measured, split: str) -> Measured:
        bits = means["loss"] / math.log(2)
        return {"loss": means["loss"], "bits_per_byte": bits / self.bytes_per_token[split]}


def criterion_of(data: Data) -> Criterion:
    """Returns the criterion of a data set's task."""
    if data.task == "classification":
        return Classification()
    assert data.bytes_per_token is not None, "checked as the data set was built"
    return LanguageModeling(data.bytes_per_token)
