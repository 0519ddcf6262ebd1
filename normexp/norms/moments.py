"""Mean and variance over any axes, with a mask, in float32 or wider, for every norm here.

Axis letters, as in every shape comment of the project:
    N samples, C channels (features), H W image rows and columns, T token positions,
    * any number of position axes (none, L, H W, D H W), G groups of samples, S replicas,
    V vocabulary

Masks are called `real` here: true where a value counts, broadcastable to the values, as (N, 1, *).
Values that are not real must already be zero (`zero_padding`): 0 * NaN would reach a gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Mean, biased variance and the number of pooled values, broadcastable to the values.

    The number is a single integer unless it depends on a mask.
    """

    mean: Tensor
    var: Tensor
    count: int | Tensor


def widen(x: Tensor) -> Tensor:
    """Returns `x` in float32, or in its own dtype if that is wider: squares in bf16 lose digits."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns float32, or the dtype of `x` if that is wider."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def zero_padding(x: Tensor, real: Tensor | None) -> Tensor:
    """Returns `x` with zeros where `real` is false, even in place of NaN."""
    return x if real is None else torch.where(real, x, 0)


def centre(x: Tensor, mean: Tensor, real: Tensor | None) -> Tensor:
    """Returns x - mean, zero where `real` is false."""
    return zero_padding(x - mean, real)


def count_values(x: Tensor, real: Tensor | None, dims: tuple[int, ...]) -> int | Tensor:
    """Returns how many values of `x` each statistic over `dims` pools."""
    if real is None:
        return math.prod([x.shape[dim] for dim in dims])  # lists: dynamo cannot trace a generator
    shared = math.prod([x.shape[dim] for dim in dims if real.shape[dim] == 1])
    count = real.sum(dim=dims, keepdim=True) if dims else real
    return count.to(x.dtype) * shared if shared != 1 else count.to(x.dtype)


def at_least_one(count: int | Tensor) -> int | Tensor:
    """Returns `count`, or 1 in place of 0, to divide by: the mean of padding alone is then 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def measure_mean(
    x: Tensor, real: Tensor | None, dims: tuple[int, ...]
) -> tuple[Tensor, int | Tensor]:
    """Returns the mean over `dims`, kept with size 1, and the number of values behind it."""
    count = count_values(x, real, dims)
    if not dims:
        return x, count
    return x.sum(dim=dims, keepdim=True) / at_least_one(count), count


def measure(x: Tensor, real: Tensor | None, dims: tuple[int, ...]) -> Moments:
    """Returns the moments over `dims`, kept with size 1; over no axis, each value is its mean.

    The variance is that of deviations from the mean: E[x^2] - E[x]^2 would lose digits.
    """
    if not dims:
        return Moments(x, torch.zeros_like(x), count_values(x, real, dims))
    if real is None:
        var, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
        return Moments(mean, var, count_values(x, real, dims))
    mean, count = measure_mean(x, real, dims)
    squares = centre(x, mean, real).square()
    return Moments(mean, squares.sum(dim=dims, keepdim=True) / at_least_one(count), count)


def pool_mean(means: Tensor, count: int | Tensor, dim: int) -> tuple[Tensor, int | Tensor]:
    """Returns the mean of all values from means over parts of them, and the number of values.

    Args:
        means: one per part, along the axis `dim`, which is kept with size 1.
        count: number of values in each part.
    """
    num_parts = means.shape[dim]
    if num_parts == 1:
        return means, count
    if isinstance(count, Tensor):
        total = count.sum(dim=dim, keepdim=True)
        return (count / at_least_one(total) * means).sum(dim=dim, keepdim=True), total
    return (1 / num_parts * means).sum(dim=dim, keepdim=True), count * num_parts


def pool(parts: Moments, dim: int) -> Moments:
    """Returns the moments of all values from those of parts of them along the axis `dim`.

    The variance within the parts plus that between their means.
    """
    means, variances, count = parts
    if means.shape[dim] == 1:
        return parts
    mean, total = pool_mean(means, count, dim)
    var, _ = pool_mean(variances + (means - mean).square(), count, dim)
    return Moments(mean, var, total)


def unbiased(var: Tensor, count: int | Tensor) -> Tensor:
    """Returns a biased variance over n = `count` values times n / (n - 1); unchanged below two."""
    fewer = (count - 1).clamp(min=1) if isinstance(count, Tensor) else max(count - 1, 1)
    return var * (count / fewer)
