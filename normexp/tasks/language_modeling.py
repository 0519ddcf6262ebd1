"""Naming the next token of a text."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from normexp.batching.replicas import Batch, Measured
from normexp.tasks.training import TrainingTask


class LanguageModeling(TrainingTask):
    """Cross-entropy in nats per token, and bits per byte of the text it stands for."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        logits, targets = output.flatten(0, 1), batch["targets"].flatten()  # (N*T, V), (N*T,)
        return functional.cross_entropy(logits, targets, reduction="sum")

    def summarise(self, means: Measured, split: str) -> Measured:
        assert self.data.bytes_per_token is not None
        bits = means["loss"] / math.log(2)
        return {"loss": means["loss"], "bits_per_byte": bits / self.data.bytes_per_token[split]}
