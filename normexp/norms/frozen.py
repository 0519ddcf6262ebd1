"""Batch normalization whose statistics no longer move."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.norms.none import in_dtype_of, zero_masked
from normexp.norms.site import widen


class FrozenBatchNorm(nn.Module):
    """(x - running_mean) / sqrt(running_var + eps) * weight + bias, by statistics that stay fixed.

    Shape (N, C, *) in and out, in training and evaluation alike: nothing is pooled. Statistics are
    0 and 1 unless they are loaded from a batch norm, whose state this one takes. Weight and bias
    are trained; torchvision's FrozenBatchNorm2d fixes them too, and takes 4-D inputs alone. Used to
    fine-tune detectors at 1 or 2 images (torchvision, Detectron); no paper of its own.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_load_state_dict_pre_hook(_drop_counter)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = zero_masked(widen(x), mask)
        mean, var = self.running_mean.to(wide.dtype), self.running_var.to(wide.dtype)
        weight, bias = in_dtype_of(wide, self.weight), in_dtype_of(wide, self.bias)
        out = F.batch_norm(wide, mean, var, weight, bias, False, 0.0, self.eps)
        return zero_masked(out, mask).to(x.dtype)


def _drop_counter(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    """A batch norm's counter of steps has no place here."""
    del module, rest
    state.pop(f"{prefix}num_batches_tracked", None)
