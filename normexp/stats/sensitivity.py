"""Batch-size sensitivity: what a norm loses as the size along one axis shrinks.

The axis is whichever size varies: norm_batch_size, micro_batch_size or batch_size. Values are
(num_seeds, num_sizes): row i is one seed at every size, so that each number is computed within a
seed and its t interval is over seeds. NaN marks a run that is missing or diverged. It is never
filled in: a number uses the seeds that have all the values it needs, its n says how many, and
`seeds_at` counts them per size. Seeds that diverge at small sizes are likely the worst ones, so a
loss with n below `num_seeds` is flattering and is shown with both counts.

A loss is positive where the metric gets worse, in the metric's unit, whether the metric is better
high (accuracy) or low (a loss in nats).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import trapezoid

from normexp.stats.interval import Array, Interval, mean

Status = Literal["never", "below", "always", "unknown"]


@dataclass(frozen=True)
class Threshold:
    """The size below which the norm loses more than `tolerance`; see `size_threshold`.

    shown_within: every loss from `size` up has its upper bound at or under the tolerance; False
    means that more seeds could still show a loss there.
    """

    size: int
    status: Status
    tolerance: float
    shown_within: bool


@dataclass(frozen=True)
class Sensitivity:
    """The four numbers of one norm, the loss at each size, and how many seeds there were."""

    reference_size: int
    smallest_size: int
    drop: Interval
    slope: Interval
    area: Interval
    losses: dict[int, Interval]
    threshold: Threshold
    num_seeds: int
    seeds_at: dict[int, int]


def batch_size_sensitivity(
    values: ArrayLike,
    sizes: Sequence[int],
    *,
    higher_is_better: bool,
    tolerance: float,
    level: float = 0.95,
) -> Sensitivity:
    """All numbers of this file for values (num_seeds, num_sizes), columns in the order of sizes."""
    table, ordered = _by_size(values, sizes)
    losses = losses_by_size(table, ordered, higher_is_better=higher_is_better, level=level)
    present = np.isfinite(table).sum(axis=0)
    return Sensitivity(
        reference_size=ordered[-1],
        smallest_size=ordered[0],
        drop=losses[ordered[0]],
        slope=slope_per_halving(table, ordered, higher_is_better=higher_is_better, level=level),
        area=area_over_log2_size(table, ordered, level=level),
        losses=losses,
        threshold=size_threshold(losses, ordered[-1], tolerance=tolerance),
        num_seeds=len(table),
        seeds_at={size: int(count) for size, count in zip(ordered, present, strict=True)},
    )


def losses_by_size(
    values: ArrayLike, sizes: Sequence[int], *, higher_is_better: bool, level: float = 0.95
) -> dict[int, Interval]:
    """Loss from the reference (the largest size) to each smaller size, in ascending order of size.

    Mean over seeds of value(reference) - value(size), the sign turned where lower is better, with
    a t interval over the seeds that have both. The entry of the smallest size is the drop.
    """
    table, ordered = _by_size(values, sizes)
    sign = 1.0 if higher_is_better else -1.0
    reference = table[:, -1]
    return {
        size: _mean_of_present(sign * (reference - column), level)
        for size, column in zip(ordered[:-1], table.T, strict=False)
    }


def slope_per_halving(
    values: ArrayLike, sizes: Sequence[int], *, higher_is_better: bool, level: float = 0.95
) -> Interval:
    """Loss per halving of the size: the least-squares slope of the metric on log2 size.

    With x = log2 size, a seed's slope is sum (x - mean x) value / sum (x - mean x)^2 and its loss
    per halving that slope, the sign turned where lower is better; t interval over the seeds that
    have every size (a seed without its worst sizes would have a flatter line).
    """
    table, ordered = _by_size(values, sizes)
    x = np.log2(ordered)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    sign = 1.0 if higher_is_better else -1.0
    return _mean_of_present(sign * (table @ weights), level)


def area_over_log2_size(
    values: ArrayLike, sizes: Sequence[int], *, level: float = 0.95
) -> Interval:
    """Average of the metric over the range of log2 size, in the metric's unit.

    A seed's area is the trapezoid integral of its curve over log2 size divided by the range, so
    that a part of the axis with many tested sizes weighs no more; t interval over the seeds that
    have every size.
    """
    table, ordered = _by_size(values, sizes)
    x = np.log2(ordered)
    return _mean_of_present(trapezoid(table, x, axis=1) / (x[-1] - x[0]), level)


def size_threshold(
    losses: dict[int, Interval], reference_size: int, *, tolerance: float
) -> Threshold:
    """The smallest size such that at it and at every larger one no loss > tolerance is shown.

    losses: from `losses_by_size`. A loss above the tolerance is shown where its lower bound exceeds
    it. The walk goes down from the reference and stops at the first size where that is so.
    status: `never`, no size shows it and `size` is the smallest; `below`, sizes under `size` do;
    `always`, already the first size under the reference does and `size` is the reference;
    `unknown`, the walk met a size with too few pairs for bounds, and says nothing from there down.
    The error rate, (1 - level) / 2, holds for each size by itself.
    """
    size, shown_within = reference_size, True
    for smaller in sorted(losses, reverse=True):
        low, high = losses[smaller].low, losses[smaller].high
        if low is None or high is None:
            return Threshold(size, "unknown", tolerance, shown_within)
        if low > tolerance:
            status = "always" if size == reference_size else "below"
            return Threshold(size, status, tolerance, shown_within)
        size, shown_within = smaller, shown_within and high <= tolerance
    return Threshold(size, "never", tolerance, shown_within)


def _by_size(values: ArrayLike, sizes: Sequence[int]) -> tuple[Array, list[int]]:
    """The table with its columns in ascending order of size, checked."""
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != len(sizes):
        raise ValueError(f"values have shape {table.shape}; expected (seeds, {len(sizes)} sizes)")
    if np.isinf(table).any():
        raise ValueError("values hold infinity; mark a diverged run by NaN")
    if len(sizes) < 2 or len(set(sizes)) < len(sizes) or min(sizes) < 1:
        raise ValueError(f"sizes={list(sizes)}: two or more different sizes of at least 1 needed")
    order = np.argsort(sizes)
    return table[:, order], [int(sizes[i]) for i in order]


def _mean_of_present(per_seed: Array, level: float) -> Interval:
    """Mean and t interval over the seeds that have the number."""
    return mean(per_seed[np.isfinite(per_seed)], level=level)
