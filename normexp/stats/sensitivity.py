"""Batch-size sensitivity: what a norm loses as one size shrinks.

Values have shape (num_seeds, num_sizes): each row is one seed at every size, columns in ascending
order of size, so every number is computed within a seed and its t interval is over seeds. NaN marks
a run that is missing or diverged; it is never filled in. A number uses the seeds that have all the
values it needs and its n counts them. Seeds that diverge at small sizes are probably the worst
ones, so a loss with n below `num_seeds` is optimistic.

A loss is in the metric's unit and positive if the metric gets worse, also where lower is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from normexp.stats.interval import Array, Interval, mean


@dataclass(frozen=True)
class Threshold:
    """The size below which a loss of more than the tolerance is shown; see `size_threshold`."""

    size: int
    status: Literal["never", "below", "always", "unknown"]


@dataclass(frozen=True)
class Sensitivity:
    """What one norm loses.

    reference_size: the largest size
    drop: loss from the largest to the smallest size
    slope: loss per halving of the size: least squares on log2 size, within each seed
    area: mean of the metric over log2 size: trapezoid integral / range, within each seed
    losses: loss from the largest size to each smaller size, in ascending order of size
    """

    reference_size: int
    drop: Interval
    slope: Interval
    area: Interval
    losses: dict[int, Interval]
    threshold: Threshold
    num_seeds: int


def batch_size_sensitivity(
    values: ArrayLike,
    sizes: Sequence[int],
    *,
    higher_is_better: bool,
    tolerance: float,
) -> Sensitivity:
    """The sensitivity of values (num_seeds, num_sizes) to ascending `sizes`.

    Raises:
        ValueError: shapes that do not match, infinite values, or sizes that do not ascend.
    """
    table = _checked(values, sizes)
    sign = 1.0 if higher_is_better else -1.0
    x = np.log2(sizes)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()  # of the least-squares slope
    trapezoids = np.diff(x) * (table[:, 1:] + table[:, :-1]) / 2.0
    losses = {
        size: _mean_of_present(sign * (table[:, -1] - column))
        for size, column in zip(sizes[:-1], table.T, strict=False)
    }
    return Sensitivity(
        reference_size=sizes[-1],
        drop=losses[sizes[0]],
        slope=_mean_of_present(sign * (table @ weights)),
        area=_mean_of_present(trapezoids.sum(axis=1) / (x[-1] - x[0])),
        losses=losses,
        threshold=size_threshold(losses, sizes[-1], tolerance=tolerance),
        num_seeds=len(table),
    )


def size_threshold(
    losses: dict[int, Interval], reference_size: int, *, tolerance: float
) -> Threshold:
    """The smallest size such that no size from there up is shown to lose more than the tolerance.

    A loss is shown to exceed the tolerance if its lower bound does. The walk goes down from the
    reference size, the largest, and stops at the first such size.
    status: `never`: no size is shown to lose that much; `below`: sizes under `size` are; `always`:
    already the first size under the reference is; `unknown`: the walk met a size with too few seeds
    for an interval.
    The error rate, (1 - level) / 2, holds for each size separately.
    """
    size = reference_size
    for smaller in sorted(losses, reverse=True):
        low = losses[smaller].low
        if low is None:
            return Threshold(size, "unknown")
        if low > tolerance:
            return Threshold(size, "always" if size == reference_size else "below")
        size = smaller
    return Threshold(size, "never")


def _checked(values: ArrayLike, sizes: Sequence[int]) -> Array:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != len(sizes):
        raise ValueError(f"values have shape {table.shape}; expected (seeds, {len(sizes)} sizes)")
    if np.isinf(table).any():
        raise ValueError("values hold infinity; mark a diverged run by NaN")
    if len(sizes) < 2 or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes={list(sizes)}: give two or more ascending sizes of at least 1")
    return table


def _mean_of_present(per_seed: Array) -> Interval:
    """Mean over the seeds that have the number."""
    return mean(per_seed[np.isfinite(per_seed)])
