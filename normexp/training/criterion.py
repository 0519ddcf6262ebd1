"""What a model minimises, and the metrics of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from normexp.norms.base import wide_dtype
from normexp.training.batching.replicas import Batch, Measurements
from normexp.training.data.dataset import Data


class Classification:
    """Cross-entropy in nats, and accuracy as the share of samples classified correctly.

    Attributes:
        metrics: names of what `summarise` returns.
    """

    metrics = ("loss", "accuracy")

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the loss summed over the batch's targets."""
        # output (N, num_classes), targets (N,)
        return cross_entropy(output, batch["targets"], reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measurements:
        """Returns `loss`, and `per_sample`: whether each sample is right (N,), for samples.npz."""
        return {
            "loss": self.loss(output, batch),
            "per_sample": output.argmax(dim=-1) == batch["targets"],
        }

    def summarise(self, split: str, loss: Tensor, per_sample: Tensor) -> Measurements:
        """Returns metrics (S,) from the mean loss over targets (S,) and `per_sample` (S, N)."""
        del split
        # argmax of NaN is class 0
        accuracy = torch.where(loss.isfinite(), per_sample.double().mean(dim=1), torch.nan)
        return {"loss": loss, "accuracy": accuracy}


@dataclass(eq=False)
class LanguageModeling:
    """Cross-entropy in nats per token, and in bits per byte of UTF-8 text; as `Classification`.

    Args:
        bytes_per_token: of each split.
    """

    bytes_per_token: Mapping[str, float]
    metrics = ("loss", "bits_per_byte")

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()  # (N*T, V), (N*T,)
        return cross_entropy(logits, targets, reduction="sum")

    def measure(self, output: Tensor, batch: Batch) -> Measurements:
        """Each sample is a sequence's mean loss per token, in nats."""
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()
        losses = cross_entropy(logits, targets, reduction="none")  # (N*T,)
        return {
            "loss": losses.sum(),
            "per_sample": losses.unflatten(0, output.shape[:2]).mean(dim=1),
        }

    def summarise(self, split: str, loss: Tensor, per_sample: Tensor) -> Measurements:
        del per_sample
        return {"loss": loss, "bits_per_byte": loss / math.log(2) / self.bytes_per_token[split]}


Criterion = Classification | LanguageModeling


def criterion_of(data: Data) -> Criterion:
    """Returns the criterion of a data set's task."""
    if data.task == "classification":
        return Classification()
    assert data.bytes_per_token is not None, "checked as the data set was built"
    return LanguageModeling(data.bytes_per_token)


def cross_entropy(logits: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
    """In float32 at least: under vmap, autocast leaves the loss in bfloat16."""
    return functional.cross_entropy(logits.to(wide_dtype(logits)), targets, reduction=reduction)
