"""What norms that follow batch norm share: groups of samples, an affine, running averages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.moments import Moments, pool, zero_masked_groups
from normexp.norms.state import State


class Factors(NamedTuple):
    """x (G, N, C, *) standardized, as two factors: `z` like x, and `scale`, which broadcasts to it.

    A scale of None is 1.
    """

    z: Tensor
    scale: Tensor | None


class BatchVariant(BatchNorm):
    """z * scale * weight + bias, as `standardize` makes them; state and arguments of BatchNorm.

    A variant says how a batch is standardized in training, and in evaluation if that differs too.
    """

    def standardize(self, x: Tensor, mask: Tensor | None) -> tuple[Factors, Moments]:
        """By the batch x (G, N, C, *), which is zero where mask (G, N, *) is, and its moments."""
        raise NotImplementedError

    def standardize_by_running(self, x: Tensor, mask: Tensor | None) -> Factors:
        """By the running averages."""
        del mask
        mean, var = self.running_moments(x)
        return Factors(x - over_groups(mean, x), over_groups(torch.rsqrt(var + self.eps), x))

    def normalize_by_batch(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        factors, moments = self.standardize(x, mask)
        self.advance(moments)
        return scale_and_shift(*factors, weight, bias)

    def normalize_by_running(
        self, x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return scale_and_shift(*self.standardize_by_running(x, mask), weight, bias)

    def running_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Running mean and variance (1, C), as if of one group, in the dtype of `x`."""
        assert self.running_mean is not None and self.running_var is not None
        return self.running_mean.to(x.dtype)[None], self.running_var.to(x.dtype)[None]

    def advance(self, moments: Moments) -> None:
        """Moves the state one step, by the moments (G, C) of all groups."""
        self._advance(pool(moments))

    def advance_counters(self, count: int | Tensor, dtype: torch.dtype) -> float | Tensor:
        """Counts a step over `count` values; returns the weight of what is new in an average."""
        assert self.num_batches_tracked is not None and self.num_values is not None
        self.num_batches_tracked.add_(1)
        factor = self._factor(self.num_batches_tracked, dtype)
        if not isinstance(count, Tensor):
            self.num_values.fill_(count)
            return factor
        self.num_values.copy_(count[0])
        return factor * (count > 0).to(dtype)  # all padding: nothing to move by


def refuse_no_momentum(momentum: float | None, name: str) -> None:
    """Raises for momentum=None, where equal weights of all steps are not what a norm means."""
    if momentum is None:
        raise UserError(f"momentum=null does not fit {name}; try norm.momentum=0.1")


def as_before(state: Tensor, dtype: torch.dtype) -> Tensor:
    """`state` as it is before the step writes it, also to the backward of a compiled graph.

    torch's partitioner takes a buffer that the forward writes for an unchanged input, and computes
    again, from its new value, what the backward needs and a few cheap operations made of the old.
    A sum over an axis of length one is the identity and not an operation that it does again.
    """
    return state.to(dtype)[None].cumsum(dim=0)[0]


def over_groups(vector: Tensor, x: Tensor) -> Tensor:
    """`vector` (C,) or (G, C) shaped to multiply x (G, N, C, *)."""
    rows = vector if vector.ndim == 2 else vector[None]
    return rows[:, None].reshape(len(rows), 1, -1, *[1] * (x.ndim - 3))


def scale_and_shift(
    z: Tensor, scale: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """z (G, N, C, *) times scale, which broadcasts to it, times weight (C,) plus bias (C,).

    The small factors are multiplied before they meet `z`, which saves a pass over the data.
    """
    if weight is not None:
        gain = over_groups(weight, z)
        scale = gain if scale is None else scale * gain
    if scale is None:
        return z
    return z * scale if bias is None else torch.addcmul(over_groups(bias, z), z, scale)


def count_groups(x: Tensor, mask: Tensor | None) -> int | Tensor:
    """Real values per group and channel of x (G, N, C, *): one integer, or (G, 1)."""
    if mask is None:
        return x.shape[1] * x.shape[3:].numel()
    return mask.flatten(1).sum(dim=1, keepdim=True).to(x.dtype)


def sum_groups(x: Tensor) -> Tensor:
    """Sum of x (G, N, C, *) over samples and positions: (G, C)."""
    return x.sum(dim=(1, *range(3, x.ndim)))


def centred(x: Tensor, mean: Tensor, mask: Tensor | None) -> Tensor:
    """x (G, N, C, *) minus the means (G, C), zero where masked."""
    return zero_masked_groups(x - over_groups(mean, x), mask)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """`count` to divide by: where all is padding, a sum is zero and so is its mean."""
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def pool_means(groups: Moments) -> Moments:
    """As `moments.pool` where `var` holds a mean, which adds up without a part between groups."""
    means, values, counts = groups
    total = counts.sum(dim=0) if isinstance(counts, Tensor) else counts * len(means)
    weights = counts / at_least_one(total)
    return Moments((weights * means).sum(dim=0), (weights * values).sum(dim=0), total)


def average_parts(names: Iterable[str], start: State, parts: list[State]) -> State:
    """Means of buffers over the parts of a step, weighted by their `num_values`; see `merge_state`.

    Where no part has a real value the start stays. All values may lead with replica axes.
    """
    values = torch.stack([part["num_values"] for part in parts])  # (parts, ...)
    merged = {"num_values": values.sum(dim=0)}
    for name in names:
        ends = torch.stack([part[name] for part in parts])  # (parts, ..., C)
        counts = values.view(*values.shape, *[1] * (ends.ndim - values.ndim)).to(ends.dtype)
        total = counts.sum(dim=0)
        mean = (counts / total.clamp(min=1) * ends).sum(dim=0)
        merged[name] = torch.where(total > 0, mean, start[name])
    return merged


def measure_means(x: Tensor, mask: Tensor | None) -> tuple[Tensor, int | Tensor]:
    """Means (G, C) of x (G, N, C, *), which is zero where masked, and the numbers of values."""
    count = count_groups(x, mask)
    return sum_groups(x) / at_least_one(count), count


def measure_groups(x: Tensor, mask: Tensor | None) -> Moments:
    """Moments by group of x (G, N, C, *), which is zero where masked."""
    if mask is None:
        var, mean = torch.var_mean(x, dim=(1, *range(3, x.ndim)), correction=0)
        return Moments(mean, var, count_groups(x, mask))
    mean, count = measure_means(x, mask)
    var = sum_groups(centred(x, mean, mask).square()) / at_least_one(count)
    return Moments(mean, var, count)


def measure_samples(x: Tensor, mask: Tensor | None) -> Moments:
    """Moments (G, N, C, 1, ...) of each channel of each sample of x (G, N, C, *), over positions.

    `x` is zero where mask (G, N, *) is false; the counts are (G, N, 1, 1, ...).
    """
    dims = tuple(range(3, x.ndim))
    if not dims:
        count = 1 if mask is None else mask.unsqueeze(2).to(x.dtype)
        return Moments(x, torch.zeros_like(x), count)
    if mask is None:
        var, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
        return Moments(mean, var, x.shape[3:].numel())
    count = mask.unsqueeze(2).sum(dim=dims, keepdim=True).to(x.dtype)
    safe = count.clamp(min=1)
    mean = x.sum(dim=dims, keepdim=True) / safe
    deviations = zero_masked_groups(x - mean, mask)
    return Moments(mean, deviations.square().sum(dim=dims, keepdim=True) / safe, count)
