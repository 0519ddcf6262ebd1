"""Batch normalization of sequences with statistics of their own at each position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.contract import State, widen
from normexp.norms.moments import Moments, normalize_groups, pool, unbiased
from normexp.norms.none import in_dtype_of, zero_masked


class BatchNormPerPosition(BatchNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments over the samples at position t.

    Shape (N, C, T) in and out, statistics in float32 or wider. No position looks at another, in
    training as in evaluation. Batch norm of C * T features (arXiv:1502.03167), but with a weight
    and a bias per channel as every norm here has them: else it would learn T times as much as the
    norms that it is compared with. Running averages are (T, C), a row per position; a shorter input
    moves the first rows, and a mask (N, T) leaves out what is padding.

    Where one sample alone is real at a position its variance is zero: training outputs the bias
    there, and the running variance stays as it was.

    Args:
        num_positions: T, the longest sequence; only padding may lie beyond.
        momentum: weight of the new value in the running averages.

    Raises:
        UserError: momentum outside (0, 1]; in forward, one sample in training, an input that is not
            (N, C, T), or real positions beyond `num_positions`.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    num_values: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        num_positions: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        if momentum is None:
            raise UserError(
                "momentum=null does not fit batch norm per position, whose positions are not real "
                "equally often; try norm.momentum=0.1"
            )
        super().__init__(num_features, eps=eps, momentum=momentum, affine=affine)
        self.num_positions = num_positions
        self.running_mean = torch.zeros(num_positions, num_features)
        self.running_var = torch.ones(num_positions, num_features)
        self.num_values = torch.zeros(num_positions, dtype=torch.int64)

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return (
            f"{self.num_features}, positions={self.num_positions}, eps={self.eps}, "
            f"momentum={self.momentum}, affine={affine}"
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim != 3:
            raise UserError(
                "batch norm per position needs one positions axis (N, C, T), not an input of shape "
                f"{tuple(x.shape)}; try norm=batch, or norm.view=sequence for tokens"
            )
        return self.forward_groups(x[None], None if mask is None else mask[None])[0]

    def forward_groups(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Training with statistics per group, x (G, N, C, T) and mask (G, N, T).

        The running averages move once, by the moments of all values of all groups together.
        """
        surplus = x.shape[-1] - self.num_positions
        if surplus > 0:
            padding = None if mask is None else mask[..., self.num_positions :]
            refuse_real_positions(padding, x.shape[-1], self.num_positions)
            known = None if mask is None else mask[..., : self.num_positions]
            return F.pad(self.forward_groups(x[..., : self.num_positions], known), (0, surplus))
        flat_mask = None if mask is None else mask.flatten(0, 1)
        wide = zero_masked(widen(x).flatten(0, 1), flat_mask).unflatten(0, x.shape[:2])
        out = self._by_batch(wide, mask) if self.training else self._by_running_averages(wide)
        return zero_masked(out.flatten(0, 1), flat_mask).unflatten(0, x.shape[:2]).to(x.dtype)

    def _by_batch(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Each position of each group as a group of samples of its own."""
        num_groups, num_samples, _, num_positions = x.shape
        if num_samples == 1:
            raise UserError(
                "batch norm per position got one sample, so one value per statistic; it needs 2 or "
                "more: try a larger batch_size or norm_batch_size"
            )
        rows = x.permute(0, 3, 1, 2).flatten(0, 1)  # (G * T, N, C)
        row_mask = None if mask is None else mask.transpose(1, 2).flatten(0, 1)
        weight, bias = in_dtype_of(x, self.weight), in_dtype_of(x, self.bias)
        out, (mean, var, count) = normalize_groups(rows, row_mask, weight, bias, self.eps)
        by_group = (num_groups, num_positions)
        if isinstance(count, Tensor):
            count = count.unflatten(0, by_group)
        self._advance(pool(Moments(mean.unflatten(0, by_group), var.unflatten(0, by_group), count)))
        return out.unflatten(0, by_group).permute(0, 2, 3, 1)

    def _by_running_averages(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        mean, var = (rows[:length].T.to(x.dtype) for rows in (self.running_mean, self.running_var))
        out = (x - mean) * torch.rsqrt(var + self.eps)  # (G, N, C, T)
        weight, bias = in_dtype_of(x, self.weight), in_dtype_of(x, self.bias)
        return out if weight is None or bias is None else out * weight[:, None] + bias[:, None]

    @torch.no_grad()
    def _advance(self, moments: Moments) -> None:
        """Moves the running averages by one step, each row by what it has: a variance needs two."""
        assert self.momentum is not None
        mean, var, count = moments  # (T, C), T of the input
        count = count[:, 0] if isinstance(count, Tensor) else mean.new_full((len(mean),), count)
        beyond = self.num_positions - len(mean)
        mean, var = F.pad(mean, (0, 0, 0, beyond)), F.pad(var, (0, 0, 0, beyond))
        count = F.pad(count, (0, beyond))
        self.num_batches_tracked.add_(1)
        self.num_values.copy_(count)
        count = count[:, None]
        factor = self.momentum * (count > 0).to(mean.dtype)
        self.running_mean.mul_(1 - factor).add_(factor * mean)
        factor = self.momentum * (count > 1).to(mean.dtype)
        self.running_var.mul_(1 - factor).add_(factor * unbiased(var, count))

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """As `BatchNorm.merge_state`, position by position with the numbers of values there."""
        merged = super().merge_state(start, parts, shares)
        known = merged["num_values"][..., None] > 1
        merged["running_var"] = torch.where(known, merged["running_var"], start["running_var"])
        return merged


def refuse_real_positions(padding: Tensor | None, length: int, num_positions: int) -> None:
    """Raises unless the mask says that all of the positions beyond `num_positions` are padding."""
    if padding is None or bool(padding.any()):
        raise UserError(
            f"a sequence of {length} positions is longer than num_positions={num_positions} of "
            f"batch norm per position; cut it, or set +norm.num_positions={length}"
        )
