"""Statistics of a study: pure functions on arrays over seeds."""

from normexp.stats.family import (
    ALPHA,
    Verdict,
    decide,
    equivalence_p,
    p_value,
    seeds_for,
    smallest_difference,
)
from normexp.stats.interval import (
    Bounds,
    Interval,
    crossed_mean,
    iqm,
    log_ratio,
    mean,
    median,
    paired_difference,
    paired_improvement,
    smallest_step,
    stratified_mean,
)
from normexp.stats.sensitivity import (
    Sensitivity,
    Threshold,
    batch_size_sensitivity,
    selection_optimism,
    size_threshold,
)

__all__ = [
    "ALPHA",
    "Bounds",
    "Interval",
    "Sensitivity",
    "Threshold",
    "Verdict",
    "batch_size_sensitivity",
    "crossed_mean",
    "decide",
    "equivalence_p",
    "iqm",
    "log_ratio",
    "mean",
    "median",
    "p_value",
    "paired_difference",
    "paired_improvement",
    "seeds_for",
    "selection_optimism",
    "size_threshold",
    "smallest_difference",
    "smallest_step",
    "stratified_mean",
]
