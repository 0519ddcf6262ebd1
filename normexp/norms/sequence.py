"""Norms of sequences in which no position depends on a later one.

Causal instance and group norm take the moments of a position and all earlier ones; batch norm per
position has separate statistics at each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.base import Affine, AffineNorm, Moments, knobs, pool, unbiased, zero_padding
from normexp.norms.contract import Mask, State
from normexp.norms.kernel import batch_norm, normalize_groups
from normexp.norms.running import RunningMomentsNorm
from normexp.norms.sample import ChannelGroupsNorm, refuse_one_position


class CausalGroupNorm(ChannelGroupsNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments over C/G channels and s <= t.

    Shape (N, C, T) in and out, or (N, C), which is one position. The last position equals group
    norm (arXiv:1803.08494) over the whole sequence. G = C is `CausalInstanceNorm`, and G = 1 is the
    cLN of Conv-TasNet (arXiv:1809.07454).
    """

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if self.training:
            self.refuse_one_value(x)
        return normalize_prefixes(x, real, self.num_groups, affine, self.eps)


class CausalInstanceNorm(AffineNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments of one channel over s <= t.

    Shape (N, C, T) in and out. Instance norm (arXiv:1607.08022) of each prefix of a sequence. The
    first real position of a sample pools one value, so its variance is 0 and its output is always
    the bias. Sequences of one position are therefore refused in training, but not in evaluation,
    where a generated text starts with one.
    """

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if self.training or x.ndim == 2:
            refuse_one_position(x.shape, "causal instance norm", "norm=causal_group")
        return normalize_prefixes(x, real, self.num_features, affine, self.eps)


def normalize_prefixes(
    x: Tensor, real: Mask, num_groups: int, affine: Affine, eps: float
) -> Tensor:
    """Normalizes each position by its group's moments over the real positions up to it.

    Shapes: x (N, C, T) or (N, C), real (N, 1, T) or (N, 1).
    """
    if x.ndim > 3:
        raise UserError(
            f"a causal norm needs one axis of positions (N, C, T), and an input of shape "
            f"{tuple(x.shape)} has {x.ndim - 2}; try norm=group or norm=instance"
        )
    groups = x.view(*x.shape[:2], -1).unflatten(1, (num_groups, -1))  # (N, G, C/G, T)
    real = None if real is None else real.view(len(x), 1, -1)  # (N, 1, T)
    centred, var = _centre_prefixes(groups, real)
    out = centred * torch.rsqrt(var + eps).unsqueeze(2)
    return affine.apply(out.flatten(1, 2).view(x.shape))


def _centre_prefixes(x: Tensor, real: Mask) -> tuple[Tensor, Tensor]:
    """Returns x_t - mean_t and the biased var_t over K and the real positions s <= t.

    Shapes: x (N, G, K, T), zero where `real` (N, 1, T) is false -> (N, G, K, T) and (N, G, T).

    With c_s the centred values at s, a group's sum of squared deviations grows there by sum(c_s^2),
    and by sum(c_s)^2 / (number of values before s), because the mean of the values before has moved
    (Chan, Golub and LeVeque 1979).

    No term is negative, so no digits cancel. The sums are of differences from the first real value,
    so a constant added to a sequence costs only the digits that its own rounding takes.
    """
    size, num_positions = x.shape[2:]  # K, T
    mask = None if real is None else real.unsqueeze(1)  # (N, 1, 1, T)
    if real is None:
        first = x[..., :1]
        count = torch.arange(1, num_positions + 1, dtype=x.dtype, device=x.device)
    else:
        first = x.take_along_dim(real.int().argmax(dim=-1)[:, None, None], dim=-1)
        count = real.cumsum(dim=-1).clamp(min=1).to(x.dtype)  # 1 before the first real position
    count = count * size  # values up to a position
    count_before = (count - size).clamp(min=1)
    # A constant subtracted from a whole group changes no output, so it needs no gradient.
    x = zero_padding(x - first.mean(dim=2, keepdim=True).detach(), mask)
    total = x.sum(dim=2)  # (N, G, T)
    mean = total.cumsum(dim=-1) / count
    # x - mean in a form whose backward negates the smaller tensor.
    centred = zero_padding(x + (-mean).unsqueeze(2), mask)
    with torch.autocast(x.device.type, enabled=False):  # it would round to half precision
        growth = torch.linalg.vecdot(centred, centred, dim=2)
    if size == 1:  # sum(c)^2 is sum(c^2)
        growth = growth * (count / count_before)
    else:
        growth = growth + zero_padding(total - size * mean, real).square() / count_before
    return centred, growth.cumsum(dim=-1) / count


@knobs
class BatchNormPerPosition(RunningMomentsNorm):
    """(x_t - mean_t) / sqrt(var_t + eps) * weight + bias, moments over the samples at position t.

    Shape (N, C, T) in and out. No position depends on another, in training or in evaluation.
    Running averages are (T, C), a row per position; a shorter input moves the first rows, and a
    mask (N, T) leaves out padding. It is batch norm of C * T features (arXiv:1502.03167), but with
    a weight and a bias per channel like every norm here: otherwise it would learn T times as much
    as the norms it is compared with.

    The T * C features are in position order, the order in which sites hold tokens. If only one
    sample is real at a position, its variance is zero: training outputs the bias there, and the
    running variance stays as it was.

    Args:
        num_positions: T, the longest sequence; only padding may lie beyond.
        momentum: weight of the new value in the running averages; null does not fit, because
            positions are not real equally often.

    Raises:
        UserError: in forward, one sample in training, an input that is not (N, C, T), or real
            positions beyond `num_positions`.
    """

    num_positions: int
    momentum: float = 0.1
    needs_momentum = True

    def add_state(self) -> None:
        super().add_state()
        self.running_mean = torch.zeros(self.num_positions, self.num_features)
        self.running_var = torch.ones(self.num_positions, self.num_features)
        self.num_values = torch.zeros(self.num_positions, dtype=torch.int64)

    def affine_of_features(self, x: Tensor, affine: Affine, /) -> Affine:
        """Returns weight and bias (T * C,) of the features of x (..., C, T), in its dtype."""
        return Affine(*[None if v is None else v.repeat(x.shape[-1]) for v in affine])

    def forward_groups(self, x: Tensor, mask: Mask = None) -> Tensor:
        if x.ndim != 4:
            raise UserError(
                "batch norm per position needs one axis of positions, (N, C, T), but got shape "
                f"{tuple(x.shape[1:])}; try norm=batch, or norm.view=sequence for tokens"
            )
        surplus = x.shape[-1] - self.num_positions
        if surplus <= 0:
            return super().forward_groups(x, mask)
        if mask is None or mask[..., self.num_positions :].any():
            raise UserError(
                f"a sequence of {x.shape[-1]} positions is longer than "
                f"num_positions={self.num_positions} of batch norm per position; set "
                f"+norm.num_positions={x.shape[-1]}, or qk_norm=false if it is true: there each "
                "head of a token is a position"
            )
        x, mask = x[..., : self.num_positions], mask[..., : self.num_positions]
        return F.pad(super().forward_groups(x, mask), (0, surplus))

    def check_shape(self, shape: torch.Size) -> None:
        if shape[0] == 1:
            raise UserError(
                "batch norm per position got one sample, so one value per statistic; it needs 2 or "
                "more: try a larger batch_size or norm_batch_size"
            )

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        length = x.shape[-1]
        features = x.mT.flatten(-2)  # (G, N, T * C)
        real = None if real is None else real.expand(x.shape).mT.flatten(-2)
        out, moments = normalize_groups(
            features, real, self.affine_of_features(x, affine), self.eps
        )
        self._advance_rows(pool(moments, dim=0), length)
        return out.unflatten(-1, (length, -1)).mT

    def normalize_by_running(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        length = x.shape[-1]
        mean = self.running_mean[:length].flatten().to(x.dtype)
        var = self.running_var[:length].flatten().to(x.dtype)
        features = x.flatten(0, 1).mT.flatten(-2)  # (G * N, T * C)
        affine = self.affine_of_features(x, affine)
        out = batch_norm(features, affine, (mean, var), None, self.eps)
        return out.unflatten(-1, (length, -1)).mT.unflatten(0, x.shape[:2])

    @torch.no_grad()
    def _advance_rows(self, moments: Moments, length: int) -> None:
        """Moves the first rows one step by moments (1, 1, T * C), each by its number of values."""
        missing_rows = (0, 0, 0, self.num_positions - length)
        mean, var = (F.pad(m.view(length, -1), missing_rows) for m in moments[:2])
        count = torch.zeros_like(moments.mean) + moments.count
        count = F.pad(count.view(length, -1)[:, :1], missing_rows)  # (num_positions, 1)
        self.num_batches_tracked.add_(1)
        self.num_values.add_(count.squeeze(1).long())
        weight = self.momentum * (count > 0).to(mean.dtype)
        self.running_mean.mul_(1 - weight).add_(weight * mean)
        weight = self.momentum * (count > 1).to(mean.dtype)  # a variance needs two values
        self.running_var.mul_(1 - weight).add_(weight * unbiased(var, count))

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """As `RunningMomentsNorm.merge_state`, for each position by its number of values."""
        merged = super().merge_state(start, parts, shares)
        has_variance = (merged["num_values"] - start["num_values"])[..., None] > 1
        var, start_var = merged["running_var"], start["running_var"]
        return merged | {"running_var": torch.where(has_variance, var, start_var)}
