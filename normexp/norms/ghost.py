"""Ghost batch normalization with a sub-batch size of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm, refuse_one_value
from normexp.norms.moments import Moments, normalize_groups, pool


class GhostBatchNorm(BatchNorm):
    """Batch norm whose statistics in training are over `ghost_size` samples and all positions.

    Shape (N, C, *) in and out, statistics in float32 or wider. Samples are split in order; the last
    sub-batch has what is left over. Evaluation as batch norm. arXiv:1705.08741.

    Implementations differ in the running averages, which the authors' code (eladhoffer/bigBatch)
    and TabNet's move once per sub-batch, so that the last weighs most. Here they move once a step,
    by the moments of all samples together, as where a site splits its batch by norm_batch_size.

    Args:
        ghost_size: samples that share statistics; tokens in the view `token`.

    Raises:
        UserError: as `BatchNorm`, for each sub-batch; a ghost_size below one.
    """

    def __init__(
        self,
        num_features: int,
        *,
        ghost_size: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        if ghost_size < 1:
            raise UserError(f"ghost_size={ghost_size} is not positive; try norm.ghost_size=16")
        self.ghost_size = ghost_size

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}"

    def refuse(self, shape: torch.Size) -> None:
        for size in (min(shape[0], self.ghost_size), shape[0] % self.ghost_size):
            if size:
                refuse_one_value(torch.Size((size, *shape[1:])))

    def normalize_by_batch(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        size, whole = self.ghost_size, x.shape[1] // self.ghost_size * self.ghost_size
        if x.shape[1] <= size:
            return super().normalize_by_batch(x, mask, weight, bias)
        outputs, parts = [], []
        for part, own in _split(x, mask, whole):
            group = min(size, part.shape[1])
            folded = part.unflatten(1, (-1, group)).flatten(0, 1)  # (G * g, n, C, *)
            real = None
            if own is not None:
                real = own.unflatten(1, (-1, group)).flatten(0, 1).unsqueeze(2)
            out, moments = normalize_groups(folded, real, weight, bias, self.eps)
            outputs.append(out.unflatten(0, (len(x), -1)).flatten(1, 2))
            parts.append(moments)
        means, variances = torch.cat([m.mean for m in parts]), torch.cat([m.var for m in parts])
        counts = torch.cat([torch.zeros_like(m.mean) + m.count for m in parts])
        self._advance(pool(Moments(means, variances, counts)))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def _split(x: Tensor, mask: Tensor | None, whole: int) -> list[tuple[Tensor, Tensor | None]]:
    """The samples that fill sub-batches, and those left over."""
    bounds = [(a, b) for a, b in ((0, whole), (whole, x.shape[1])) if a < b]
    return [(x[:, a:b], None if mask is None else mask[:, a:b]) for a, b in bounds]
