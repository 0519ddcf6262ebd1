"""Where the drop of a norm at small sizes comes from, in three numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from normexp.verdicts.cells import CellRow
from normexp.verdicts.compare import Comparison
from normexp.verdicts.family import difference
from normexp.verdicts.interval import Array, Interval
from normexp.verdicts.metric import Metric, describe_metric

KINDS = ("", "@precise", "@own_share")  # of statistics: running, precise, without the own share


@dataclass(frozen=True)
class Causes:
    """The terms of a drop, in the unit of the metric; positive where the smallest size is worse.

    A trained network is evaluated with running averages (r), with precise statistics (p), and with
    these after a sample's own moments got their weight in training (s); see
    training/statistics.py. From the largest size (L) to the smallest (S), for each seed,

        r_L - r_S = (s_L - s_S)                  training noise: what the weights have lost
                  + (s - p)_S - (s - p)_L        own share: each sample shaped its own statistics
                  + (p - r)_S - (p - r)_L        averages: they miss the population

    These are the terms of `normexp.diagnose` between two sizes.
    """

    arm: str
    metric: Metric
    drop: Interval
    terms: Mapping[str, Interval]


def measure_causes(comparison: Comparison) -> Causes | None:
    """The causes of an arm's drop; None if fewer than two seeds have all kinds of statistics."""
    metric = comparison.slice.metric
    is_along = comparison.is_along_sizes and comparison.slice.axis == "norm_batch_size"
    if not is_along or "@" in metric.name:
        return None
    sides = [_terms_of(side.best, metric) for side in (comparison.second, comparison.first)]
    if min(len(terms) for terms in sides) < 2:
        return None
    large, small = (terms.T for terms in sides)
    step = comparison.first.best.step(metric)
    drops = [difference(a, b, step=step) for a, b in zip(large, small, strict=True)]
    names = ("training noise", "own share", "averages")
    return Causes(comparison.arm, metric, drops[0], dict(zip(names, drops[1:], strict=True)))


def _terms_of(cell: CellRow, metric: Metric) -> Array:
    """r, s, p - s and r - p of each seed that has all of them, (n, 4); higher is better."""
    by_kind = [cell.values(describe_metric(metric.name + kind)) for kind in KINDS]
    seeds = sorted(set[int].intersection(*map(set, by_kind)))
    rows = []
    for seed in seeds:
        running, precise, own_share = (metric.sign * values[seed] for values in by_kind)
        rows.append((running, own_share, precise - own_share, running - precise))
    return np.array(rows, dtype=np.float64)
