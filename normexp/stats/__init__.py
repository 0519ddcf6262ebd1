"""Statistics of a study: pure functions on arrays over seeds."""

from normexp.stats.interval import (
    Interval,
    holm,
    iqm,
    mean,
    median,
    p_value,
    paired_difference,
    paired_improvement,
    stratified_difference,
)
from normexp.stats.sensitivity import (
    Sensitivity,
    Threshold,
    batch_size_sensitivity,
    size_threshold,
)

__all__ = [
    "Interval",
    "Sensitivity",
    "Threshold",
    "batch_size_sensitivity",
    "holm",
    "iqm",
    "mean",
    "median",
    "p_value",
    "paired_difference",
    "paired_improvement",
    "size_threshold",
    "stratified_difference",
]
