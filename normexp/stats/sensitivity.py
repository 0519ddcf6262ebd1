"""Batch-size sensitivity: what a norm loses as one size shrinks.

Values have shape (num_seeds, num_sizes): each row is one seed at every size, columns in ascending
order of size, so every number is computed within a seed and its t interval is over seeds. NaN marks
a missing run; each number uses the seeds that have every value it needs, and its n counts them. A
diverged run is not missing: callers give it the worst value of any run, so a loss is a lower bound.

A loss is in the metric's unit, and positive if the metric gets worse, whichever way is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from normexp.stats.interval import LEVEL, Array, Interval, mean, paired_difference, smallest_step


@dataclass(frozen=True)
class Threshold:
    """The adjacent sizes between which the loss first exceeds the tolerance; see `size_threshold`.

    between: the smaller size, which exceeds it, and the larger; None: not down to the smallest size
    low, high: where the lower bound of the loss exceeds it (the smaller size), and where the upper
        bound does (the larger); None: nowhere, or no interval
    """

    between: tuple[int, int] | None
    low: int | None
    high: int | None


@dataclass(frozen=True)
class Sensitivity:
    """What one norm loses between the sizes that were run.

    sizes: ascending
    losses: loss from the largest size to each smaller size; `drop`: to the smallest
    best_size: the size with the best mean
    regret: loss from the best size to the smallest
    slope: loss per halving of the size, by least squares on log2 size within each seed
    """

    sizes: list[int]
    losses: dict[int, Interval]
    best_size: int | None
    regret: Interval
    slope: Interval
    threshold: Threshold
    num_seeds: int

    @property
    def drop(self) -> Interval:
        return self.losses[self.sizes[0]]


def batch_size_sensitivity(
    values: ArrayLike,
    sizes: Sequence[int],
    *,
    higher_is_better: bool,
    tolerance: float,
    step: float | None = None,
    limit: float = math.inf,
) -> Sensitivity:
    """The sensitivity of values (num_seeds, num_sizes) to ascending `sizes`.

    step, limit: see `paired_difference`
    """
    table = np.asarray(values, dtype=np.float64) * (1.0 if higher_is_better else -1.0)
    step = smallest_step(table) if step is None else step

    def loss(start: int, end: int, level: float = LEVEL) -> Interval:
        both = table[:, [start, end]]
        a, b = both[np.isfinite(both).all(axis=1)].T
        return paired_difference(a, b, step=step, limit=limit, level=level)

    last = len(sizes) - 1
    losses = {size: loss(last, place) for place, size in enumerate(sizes[:-1])}
    best, regret = _regret(table, loss)
    x = np.log2(sizes)
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()  # of the least-squares slope
    slopes = table @ weights
    return Sensitivity(
        sizes=list(sizes),
        losses=losses,
        best_size=None if best is None else sizes[best],
        regret=regret,
        slope=mean(slopes[np.isfinite(slopes)], step=step * float(np.abs(weights).max())),
        threshold=size_threshold(losses, sizes[-1], tolerance=tolerance),
        num_seeds=len(table),
    )


def size_threshold(
    losses: dict[int, Interval], reference_size: int, *, tolerance: float
) -> Threshold:
    """Where the loss, followed from the reference size down, first exceeds the tolerance.

    Nothing is assumed between two sizes that were run. The bounds are 95 % for each size alone.
    """
    sizes = [reference_size, *sorted(losses, reverse=True)]

    def crossing(name: str) -> tuple[int, int] | None:
        for larger, size in zip(sizes, sizes[1:], strict=False):
            height = getattr(losses[size], name)
            if height is None:
                return None
            if height > tolerance:
                return size, larger
        return None

    low, high = crossing("low"), crossing("high")
    return Threshold(crossing("estimate"), low and low[0], high and high[1])


def _regret(table: Array, loss: Callable[..., Interval]) -> tuple[int | None, Interval]:
    """Column of the best mean, and the loss from the best column to the first.

    The truly best column is unknown. So each bound is the greatest over the losses from all k other
    columns, each at level 1 - 5 % / k, and 0 (multiple comparisons with the best, Hsu 1984).
    """
    means = [
        column[np.isfinite(column)].mean() if np.isfinite(column).any() else -np.inf
        for column in table.T
    ]
    count = len(means) - 1
    level = 1 - (1 - LEVEL) / count
    losses = [loss(place, 0, level) for place in range(1, count + 1)]
    if any(interval.estimate is None for interval in losses):
        return None, Interval(None, None, None, LEVEL, 0)
    best = int(np.argmax(means))
    n = min(interval.n for interval in losses)

    def greatest(name: str) -> float | None:
        ends = [getattr(interval, name) for interval in losses]
        return None if None in ends else max(0.0, *ends)

    return best, Interval(greatest("estimate"), greatest("low"), greatest("high"), LEVEL, n)


def selection_optimism(scores: ArrayLike, values: ArrayLike) -> float | None:
    """How much better the best of K candidates looks if the same seeds choose and report it.

    scores, values: (num_seeds, K), what is chosen by and what is reported; higher is better in
    both. The optimism is the mean value at the candidate that all seeds choose, less the mean over
    seeds of each one's value at the candidate that the other seeds choose (leave-one-out
    cross-validation, Stone 1974). None for fewer than 3 seeds.
    """
    chosen_by, reported = np.asarray(scores, float), np.asarray(values, float)
    n = len(reported)
    if n < 3:
        return None
    rest = chosen_by.sum(axis=0) - chosen_by  # (n, K), each row without its own seed
    crossed = reported[np.arange(n), rest.argmax(axis=1)]
    return float(reported[:, chosen_by.sum(axis=0).argmax()].mean() - crossed.mean())
