"""Where a norm's drop from the largest norm batch size to the smallest comes from.

A trained network is evaluated with running averages (r), with precise statistics (p), and with
these after a sample's own moments got their weight in training (s); see
`normexp.training.evaluation`. From the largest size (L) to the smallest (S), for each seed,

    r_L - r_S = (s_L - s_S)                  training noise: what the weights have lost
              + (s - p)_S - (s - p)_L        own share: each sample shaped its own statistics
              + (p - r)_S - (p - r)_L        averages: they miss the population

These are the terms of `normexp.diagnose` between two sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from normexp.reporting.compare import Comparison
from normexp.reporting.metric import Metric, describe_metric
from normexp.stats.interval import Interval, mean

STATISTICS = ("", "@precise", "@own_share")


@dataclass(frozen=True)
class Causes:
    """The terms of a drop, in the unit of the metric; positive where the smallest size is worse."""

    norm: str
    metric: Metric
    drop: Interval
    terms: Mapping[str, Interval]


def measure_causes(comparison: Comparison) -> Causes | None:
    """The causes of a norm's drop; None where a kind of statistics has no two seeds at a size."""
    metric = comparison.part.metric
    if not comparison.is_along_sizes or "@" in metric.name:
        return None
    small, large = (grid.best for grid in (comparison.first, comparison.second))
    kinds = [describe_metric(metric.name + kind) for kind in STATISTICS]
    tables = [[cell.values(kind) for kind in kinds] for cell in (large, small)]
    seeds = sorted(set[int].intersection(*(set(known) for table in tables for known in table)))
    if len(seeds) < 2:
        return None
    values = [[[known[seed] for seed in seeds] for known in table] for table in tables]
    of_large, of_small = comparison.first.sign * np.array(values)  # (3 statistics, n)
    running, precise, own_share = of_large - of_small
    terms = {
        "training noise": own_share,
        "own share": precise - own_share,
        "averages": running - precise,
    }
    step = small.step(metric)
    shown = {name: mean(term, step=step) for name, term in terms.items()}
    return Causes(comparison.norm, metric, mean(running, step=step), shown)
