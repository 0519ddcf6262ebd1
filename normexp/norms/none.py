"""Norms that pool nothing: none at all, and batch norm with fixed statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.affine import Affine, AffineNorm
from normexp.norms.moments import zero_padding


class NoNorm(nn.Module):
    """y = x, without parameters. Shape (N, C, *) in and out; masked positions become zero."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return zero_padding(x, None if mask is None else mask.unsqueeze(1))


class FrozenBatchNorm(AffineNorm):
    """(x - running_mean) / sqrt(running_var + eps) * weight + bias, with fixed statistics.

    The same in training and evaluation. The statistics are 0 and 1 unless loaded from a batch norm,
    whose state_dict fits. Weight and bias are trained; torchvision's FrozenBatchNorm2d fixes them
    too. Used to fine-tune detectors at 1 or 2 images (torchvision, Detectron).
    """

    running_mean: Tensor
    running_var: Tensor

    def add_state(self) -> None:
        self.register_buffer("running_mean", torch.zeros(self.num_features))
        self.register_buffer("running_var", torch.ones(self.num_features))
        self.register_load_state_dict_pre_hook(_drop_counter)

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        del real
        mean, var = self.running_mean.to(x.dtype), self.running_var.to(x.dtype)
        return F.batch_norm(x, mean, var, *affine, False, 0.0, self.eps)


def _drop_counter(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    """Drops a batch norm's step counter, which is not used here."""
    del module, rest
    state.pop(f"{prefix}num_batches_tracked", None)
